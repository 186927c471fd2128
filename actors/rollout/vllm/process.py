"""Starting vLLM inside the current process: cores, environment, arguments."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError

from actors.cluster.placement import thread_environment
from actors.cluster.rendezvous import use_interface
from actors.rollout.config import OWN_ARGUMENTS, RolloutConfig
from actors.rollout.vllm.capabilities import check_served, config_folder, has_deltanet, has_latent_attention
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_weights import require_same_head
from rl_backend.contracts import ConfigError, RLBackendError, RolloutError, UnsupportedError
from rl_backend.contracts.lora import ENGINE_RANKS, engine_slots
from rl_backend.parallel.groups import LOOPBACK

_GIB = 2**30
_LONGEST = 400
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
# Of recurrent states: rounded, they carry the error of every token on to all that follow.
_STATE_DTYPE = "float32"
# Tokens of keys and values that are shared or computed as one; the smallest that vLLM's attention on CPUs has kernels for.
_CPU_BLOCK = 32
_ATTENTION, _DELTANET = ("qkv_proj", "o_proj"), ("in_proj_qkvz", "in_proj_ba", "out_proj")
_FEED_FORWARD, _ENDS = ("gate_up_proj", "down_proj"), ("embed_tokens", "lm_head")
# One module under the name of the checkpoint and that by which the shared expert calls it.
_SHARED_GATE = ("shared_expert_gate", "expert_gate")


def process_environment(device: str) -> dict[str, str]:
    """Environment variables that must be set before the engine's process starts."""
    if device != "cpu":
        return {}
    # A weight update allocates every packed weight again; huge pages avoid most of its page faults.
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    huge_pages = {"GLIBC_TUNABLES": ":".join(filter(None, (tunables, _HUGE_PAGES))), "THP_MEM_ALLOC_ENABLE": "1"}
    return {**huge_pages, **thread_environment()}


def prepare_process(device: str, cores: tuple[int, ...], workers: int) -> None:
    """Sets what must be set before vLLM is imported. ``cores`` is empty on CUDA, else a multiple of ``workers`` long."""
    if "vllm" in sys.modules:
        raise ConfigError("vllm was imported before its engine's environment was set; start each engine in its own process")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # All processes of an engine are on this machine.
    os.environ.setdefault("VLLM_HOST_IP", LOOPBACK)
    use_interface(LOOPBACK)
    if device != "cpu":
        return
    available = os.sched_getaffinity(0)
    if not set(cores) <= available:
        raise ConfigError.of("RolloutConfig.cores", cores, f"this process may only use cores {sorted(available)}")
    # Threads inherit the affinity of the thread that starts them, so this comes before the first parallel region.
    os.sched_setaffinity(0, cores)
    per_worker = len(cores) // workers
    torch.set_num_threads(per_worker)
    groups = [cores[start : start + per_worker] for start in range(0, len(cores), per_worker)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
    os.environ["OMP_NUM_THREADS"] = str(per_worker)


def start_vllm(config: RolloutConfig, device: str) -> Any:
    """A ``vllm.LLM`` in this process, ready to sample and to have its weights updated.

    Raises:
        CheckpointError: ``config.json`` or the weights that the engine begins with are damaged, or not of one model.
        ConfigError: ``tensor_parallel`` does not divide the model.
        RolloutError: what vLLM refuses, in a sentence; or it keeps recurrent states in another dtype than float32.
        UnsupportedError: a vLLM that is not built for ``device``, or cannot serve the model there; routes of a dense
            model.
    """
    check_served(config, device)
    if config.load_format == "auto":
        require_same_head(config.model_path)
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from actors.rollout.vllm.worker import BACKEND, LOAD_FORMAT

    if device != current_platform.device_type:
        raise UnsupportedError(
            f"RolloutConfig.device={device!r}: the vLLM that is installed runs on {current_platform.device_type!r}; "
            "install the build for this device"
        )
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "dtype": config.dtype,
        "load_format": LOAD_FORMAT if config.load_format == "auto" else config.load_format,
        "tensor_parallel_size": config.tensor_parallel,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.batched_tokens,
        "enforce_eager": device == "cpu" if config.enforce_eager is None else config.enforce_eager,
        "enable_prefix_caching": config.prefix_caching,
        "enable_return_routed_experts": config.return_routed_experts,
        "seed": config.seed,
        "skip_tokenizer_init": not config.load_tokenizer,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "actors.rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "distributed_executor_backend": "mp" if config.tensor_parallel > 1 else "uni",
        **config.engine_args,
    }
    model = read_hf_config(config.model_path)
    if "vision_config" in model:
        # Prompts are token ids: a vision tower would be loaded for nothing, and a push need not send it.
        arguments["language_model_only"] = True
    if has_deltanet(model):
        arguments["mamba_ssm_cache_dtype"] = _STATE_DTYPE
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gib or 1.0) * _GIB)
        # States are cached where a piece of a prompt ends. Other models gain nothing from pieces here.
        arguments["enable_chunked_prefill"] = has_deltanet(model) and config.prefix_caching
        if has_latent_attention(model):
            # The one that vLLM prefers on machines with AMX takes bfloat16 alone, and drops a weight that an update needs.
            arguments.setdefault("attention_backend", "CPU_MLA")
        elif not has_deltanet(model):
            # vLLM takes 128: shorter prompts would be computed again for each of their samples.
            arguments.setdefault("block_size", _CPU_BLOCK)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.sleep_mode
        if config.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * _GIB)
    with _refused_in_words(config.model_path), config_folder(model) as folder:
        if folder is not None:
            arguments.setdefault("hf_config_path", folder)
        llm = _make_llm(config, device, arguments)
        _check_states(llm)
        if device == "cpu":
            # vLLM has written zeros to all of it.
            llm.collective_rpc("clear_cache")
    return llm


def _make_llm(config: RolloutConfig, device: str, arguments: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    if config.max_adapters:
        slots = engine_slots(config.max_adapters, device)
        rank = next(rank for rank in ENGINE_RANKS if rank >= config.max_adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": rank}
        if device == "cpu":
            arguments |= _targets_on_a_cpu(config, is_moe=EngineArgs(**arguments).create_model_config().is_moe)
        else:
            # Experts have one factor together, as tenants with experts_share_factor; dense models have none. Not tried.
            arguments |= {"enable_moe_shared_loras": True, "enable_mixed_moe_lora_format": True}
    if config.return_routed_experts and not EngineArgs(**arguments).create_model_config().is_moe:
        raise UnsupportedError(
            f"RolloutConfig.return_routed_experts=True: {config.model_path} has no experts; leave it out for a dense model"
        )
    return LLM(**arguments)


def _targets_on_a_cpu(config: RolloutConfig, *, is_moe: bool) -> dict[str, Any]:
    # All modules but experts, whose kernels with adapters need Triton, and the convolution of gated DeltaNet, which is no
    # product of matrices.
    if not has_deltanet(read_hf_config(config.model_path)):
        return {"lora_target_modules": list(_ATTENTION)} if is_moe else {}
    # The feed-forward modules of a mixture are those of its shared expert.
    others = _SHARED_GATE if is_moe else _ENDS
    return {"lora_target_modules": [*_ATTENTION, *_DELTANET, *_FEED_FORWARD, *others]}


def _check_states(llm: Any) -> None:
    other = sorted({dtype for dtypes in llm.collective_rpc("state_dtypes") for dtype in dtypes} - {_STATE_DTYPE})
    if other:
        raise RolloutError(
            f"vLLM keeps recurrent states in {', '.join(other)} though it was started with mamba_ssm_cache_dtype="
            f"{_STATE_DTYPE!r}: log-probs would drift from the trainer's with every token; use vLLM 0.30",
            dtypes=other,
        )


@contextmanager
def _refused_in_words(model: str) -> Iterator[None]:
    try:
        yield
    except RLBackendError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        raise RolloutError(f"vLLM does not start with {model}: {in_our_words(error)}", traceback=text) from error


def in_our_words(error: Exception) -> str:
    """What vLLM, or pydantic for it, says in an error: one line, with names of :class:`RolloutConfig` for vLLM's."""
    said = str(error)
    if isinstance(error, ValidationError):
        problems = [(".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")) for each in error.errors()]
        said = "; ".join(f"{field}: {problem}" if field else problem for field, problem in problems)
    text = " ".join(said.split()) or type(error).__name__
    for name, ours in OWN_ARGUMENTS.items():
        if ours and "_" in name:  # others are words of a sentence too
            text = re.sub(rf"(?<![\w.-])(--)?{name.replace('_', '[-_]')}\b", f"RolloutConfig.{ours}", text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
