"""Checks that this machine has the packages, GPUs and cores of a run. Machines of a cluster are left to Ray."""

import ast
import importlib.util
import os
import time
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import ray
import torch

from actors.cluster.environments import why_not_for_engines
from actors.cluster.placement import ClusterShare, cores_each, gpus_each, usable_cores
from actors.options.sampled_config import RunConfig, SampledConfig
from actors.rollout.config import RolloutConfig, check_engine_device
from actors.rollout.placement import with_share
from actors.rollout.vllm.capabilities import check_served
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, UnsupportedError, text_config
from rl_backend.lab.doctor.machine import cpu_features
from rl_backend.model.blocks import divisors, nearest
from rl_backend.runtime.bridge.checks import require_installed

_WIDE, _CLEARLY = 256, 1.2
"""Features of a model whose step is mostly products of matrices, and a factor that is more than noise."""
OF_A_CLUSTER = "are those of the cluster's machines"


def find_packages(config: RunConfig) -> str:
    """Looks for packages that the run imports, without importing them."""
    # A job's machines have packages of their own.
    if is_on_cluster():
        return f"packages {OF_A_CLUSTER}"
    found = ["torch", "ray"]
    if config.train.backend == "bridge":
        require_installed()
        found.append("Megatron")
    if config.num_engines:
        _require_vllm(config.rollout if isinstance(config, SampledConfig) else None)
        found.append("vllm")
    return ", ".join(found)


def find_devices(config: RunConfig) -> str:
    """Divides this machine's GPUs and cores over ranks and engines."""
    if is_on_cluster():
        return f"cores and GPUs {OF_A_CLUSTER}"
    gpus, ranks, engines = torch.cuda.device_count(), config.ranks * config.training_groups, config.num_engines
    try:
        each = gpus_each(ranks, engines, gpus, colocate=config.colocates)
    except ConfigError as error:
        raise ConfigError.of(f"{type(config).__name__}.ranks", config.ranks, str(error)) from None
    device = getattr(config.train.backend_cfg, "device", "auto")
    if (device == "cuda" and not gpus) or (device == "cpu" and gpus):
        ranks_get = "use auto, or hide the GPUs with CUDA_VISIBLE_DEVICES=" if gpus else "use auto or cpu"
        problem = f"PyTorch sees {gpus} GPUs on this machine, and ranks take one each if there are some; {ranks_get}"
        raise ConfigError.of(f"{type(config.train.backend_cfg).__name__}.device", device, problem)
    if isinstance(config, SampledConfig):
        served = config.rollout.replace(model_path=config.model)
        # Only for what it refuses: the cores of this machine are looked at below.
        with_share(served, ClusterShare(1, served.tensor_parallel, each))
        on_gpus = _check_engines(served, gpus, beside=ranks if config.batches_ahead else 0)
        if not on_gpus and config.transport in ("nccl", "cuda_ipc"):
            problem = "sends from GPU to GPU; on CPUs use auto, shared_memory or gloo"
            raise ConfigError.of(f"{type(config).__name__}.transport", config.transport, problem)
    devices = f"{usable_cores()} cores, {gpus} GPUs for {ranks} rank(s) and {engines} engine(s)"
    return ", ".join([devices, *faster_dtype(config)])


def faster_dtype(config: RunConfig) -> list[str]:
    """That bfloat16 is faster on this machine's processor, in a sentence; empty where it is not, or the dtype was chosen."""
    if config.chooses_dtype or "RAY_ADDRESS" in os.environ or torch.cuda.device_count():
        return []
    if text_config(read_hf_config(config.model)).get("hidden_size", 0) < _WIDE:
        return []
    speedup = bfloat16_speedup()
    return [f"--dtype bfloat16 multiplies {speedup:.1f}x as fast here"] if speedup > _CLEARLY else []


@cache
def bfloat16_speedup() -> float:
    """How many times as fast as float32 this processor multiplies bfloat16, measured; 1 without an instruction for it."""
    if not {"avx512_bf16", "amx_bf16"} & set(cpu_features()):
        return 1.0
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        factor = torch.ones(1024, 1024, dtype=dtype)
        torch.mm(factor, factor)  # the first one prepares kernels
        times = []
        for _ in range(4):
            start = time.perf_counter()
            torch.mm(factor, factor)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def is_on_cluster() -> bool:
    """Whether a run joins Ray that is there already, here or elsewhere."""
    return "RAY_ADDRESS" in os.environ or ray.is_initialized()


def require_engines(engines: RolloutConfig) -> None:
    """Checks that this machine can start engines, without any training rank."""
    if is_on_cluster():
        return
    _require_vllm(engines)
    gpus = torch.cuda.device_count()
    if 0 < gpus < engines.num_engines:
        problem = f"each takes a GPU, and this machine has {gpus}; use at most that"
        raise ConfigError.of("RolloutConfig.num_engines", engines.num_engines, problem)
    _check_engines(engines, gpus)


def _require_vllm(engines: RolloutConfig | None) -> None:
    if engines is not None and engines.py_executable is not None:
        if problem := why_not_for_engines(engines.py_executable):
            raise ConfigError.of("RolloutConfig.py_executable", engines.py_executable, problem)
    elif importlib.util.find_spec("vllm") is None:
        raise UnsupportedError("vllm is not installed, which samples responses; pip install 'rl-backend[vllm]'")


def _check_engines(engines: RolloutConfig, gpus: int, *, beside: int = 0) -> bool:
    """Whether they are on GPUs; ``beside`` processes take cores at the same time."""
    if engines.device == "cuda" and not gpus:
        raise ConfigError.of("RolloutConfig.device", "cuda", "this machine has no GPU that PyTorch sees; use auto or cpu")
    on_gpus = engines.device == "cuda" or (engines.device == "auto" and gpus and engines.cores is None)
    device = "cuda" if on_gpus else "cpu"
    check_engine_device(engines, device)
    check_served(engines, device)
    # vLLM itself would say so when engines have started; another environment's says it then.
    known = _vllm_arguments() if engines.engine_args and engines.py_executable is None else frozenset()
    if known and (unknown := sorted(set(engines.engine_args) - known)):
        near = get_close_matches(unknown[0], known, 1)
        advice = f"did you mean {near[0]}?" if near else "leave it out"
        raise ConfigError.of("RolloutConfig.engine_args", unknown, f"vllm.EngineArgs has no such argument; {advice}")
    heads, parts = text_config(read_hf_config(engines.model_path)).get("num_attention_heads"), engines.tensor_parallel
    if isinstance(heads, int) and heads % parts:
        raise ConfigError.of(
            "RolloutConfig.tensor_parallel",
            parts,
            f"does not divide num_attention_heads={heads} of {engines.model_path}; {nearest(parts, divisors(heads))}",
        )
    if not on_gpus:
        _check_cores(engines, beside)
    return bool(on_gpus)


@cache
def _vllm_arguments() -> frozenset[str]:
    # By the source, because vLLM takes long to import; empty where they are not found there.
    spec = importlib.util.find_spec("vllm")
    files = [Path(folder, "engine", "arg_utils.py") for folder in (spec and spec.submodule_search_locations) or ()]
    statements = (each for file in files if file.is_file() for each in ast.parse(file.read_bytes()).body)
    (fields,) = [each.body for each in statements if isinstance(each, ast.ClassDef) and each.name == "EngineArgs"] or [[]]
    return frozenset(
        each.target.id for each in fields if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    )


def _check_cores(engines: RolloutConfig, beside: int) -> None:
    cores, parts = sorted(os.sched_getaffinity(0)), engines.tensor_parallel
    missing = sorted({core for group in engines.cores or () for core in group} - set(cores))
    each, wrong = cores_each(engines.num_engines + beside), list[tuple[str, object, str]]()
    if missing:
        wrong.append(("RolloutConfig.cores", missing, f"this process may only use cores {cores}; use some of them"))
    if (engines.cores_per_engine or 0) > len(cores):
        problem = f"this machine has {len(cores)} cores; use at most that"
        wrong.append(("RolloutConfig.cores_per_engine", engines.cores_per_engine, problem))
    if engines.cores is None and engines.cores_per_engine is None and each % parts:
        problem = f"each engine has {each} of this machine's {len(cores)} cores, which it must divide"
        wrong.append(("RolloutConfig.tensor_parallel", parts, f"{problem}; {nearest(parts, divisors(each))}"))
    ConfigError.refuse_all(wrong)
