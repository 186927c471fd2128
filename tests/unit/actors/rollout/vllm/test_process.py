"""What an engine's process is given before vLLM is imported, and what vLLM is started with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.rollout.config import RolloutConfig
from actors.rollout.vllm import process
from actors.rollout.vllm.process import in_our_words, prepare_process, process_environment, start_vllm
from rl_backend.contracts import CheckpointError, ConfigError, RolloutError, UnsupportedError

ENVIRONMENT = ("VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_HOST_IP")
OF_CORES = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was done to this process, on a machine where it may use cores 3 to 8."""
    done: list[Any] = []
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for name in (*ENVIRONMENT, *OF_CORES):
        monkeypatch.setenv(name, "of before")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(3, 9)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: done.append(("cores", process, cores)))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: done.append(("threads", threads)))
    monkeypatch.setattr(process, "use_interface", lambda address: done.append(("interface", address)))
    return done


@pytest.mark.parametrize(
    ("cores", "workers", "bind", "threads"),
    [
        ((3, 4, 5, 6, 7, 8), 2, "3,4,5|6,7,8", "3"),
        ((8, 3), 1, "8,3", "2"),
        ((5,), 1, "5", "1"),
        ((4, 6, 8), 3, "4|6|8", "1"),
    ],
)
def test_the_workers_of_a_cpu_engine_divide_its_cores(
    prepared: list[Any], cores: tuple[int, ...], workers: int, bind: str, threads: str
) -> None:
    prepare_process("cpu", cores, workers)
    assert prepared == [("interface", "127.0.0.1"), ("cores", 0, cores), ("threads", int(threads))]
    assert [os.environ[name] for name in ENVIRONMENT] == ["ERROR", "0", "1", "127.0.0.1"]
    assert [os.environ[name] for name in OF_CORES] == [bind, threads]


def test_an_engine_on_a_gpu_keeps_its_cores_and_what_the_environment_says(
    prepared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_HOST_IP": "10.1.1.1"}
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, kept.get(name, "7"))
    prepare_process("cuda", (), 4)
    assert prepared == [("interface", "127.0.0.1")] and not any(name in os.environ for name in OF_CORES)
    assert [os.environ[name] for name in ENVIRONMENT] == ["DEBUG", "0", "1", "10.1.1.1"]


def test_what_a_process_cannot_be_prepared_for_is_refused(prepared: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"RolloutConfig\.cores=\(8, 9\): this process may only use cores \[3, 4, 5, 6, 7, 8\]"
    ):
        prepare_process("cpu", (8, 9), 1)
    assert prepared == [("interface", "127.0.0.1")]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    with pytest.raises(ConfigError, match="vllm was imported before its engine's environment was set"):
        prepare_process("cuda", (), 1)


def test_a_cpu_engine_has_huge_pages_beside_what_the_driver_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    always = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    assert process_environment("cpu") == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **always}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    both = "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"
    assert process_environment("cpu") == {"GLIBC_TUNABLES": both, **always}
    assert process_environment("cuda") == {}


class Started:
    """What vLLM was started with, in place of starting it."""

    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}
        self.served_config: dict[str, Any] | None = None
        self.is_moe = False
        self.error: Exception | None = None
        self.dtypes: list[list[str]] = [["float32"]]

    def llm(self, **arguments: Any) -> Any:
        self.arguments = arguments
        if self.error is not None:
            raise self.error
        if "hf_config_path" in arguments:
            self.served_config = json.loads((Path(arguments["hf_config_path"]) / "config.json").read_text())
        return SimpleNamespace(collective_rpc=lambda method: self.dtypes)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Started:
    import vllm as package
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.engine.arg_utils import EngineArgs

    # As if an engine's process had imported the worker: what that changes in vLLM is not for this process.
    monkeypatch.setitem(WeightTransferEngineFactory._registry, "rl_backend", None)
    made = Started()
    monkeypatch.setattr(package, "LLM", made.llm, raising=False)
    monkeypatch.setattr(EngineArgs, "__post_init__", lambda arguments: None)
    monkeypatch.setattr(EngineArgs, "create_model_config", lambda arguments: SimpleNamespace(is_moe=made.is_moe))
    monkeypatch.setattr(process, "require_same_head", lambda path: None)
    return made


def start(path: Path, device: str = "cpu", *, fields: dict[str, Any] | None = None, **settings: Any) -> Any:
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **(fields or {})}))
    return start_vllm(RolloutConfig(model_path=str(path), **settings), device)


def test_vllm_is_started_with_what_the_configuration_says(vllm: Started, tmp_path: Path) -> None:
    start(
        tmp_path,
        dtype="float32",
        load_format="dummy",
        tensor_parallel=2,
        max_model_len=300,
        max_num_batched_tokens=700,
        enforce_eager=False,
        prefix_caching=False,
        seed=5,
        load_tokenizer=True,
        kv_cache_gib=0.25,
        engine_args={"max_num_seqs": 7},
    )
    transfer = vllm.arguments.pop("weight_transfer_config")
    assert transfer.backend == "rl_backend"
    assert vllm.arguments == {
        "model": str(tmp_path),
        "dtype": "float32",
        "load_format": "dummy",
        "tensor_parallel_size": 2,
        "max_model_len": 300,
        "max_num_batched_tokens": 700,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "enable_return_routed_experts": False,
        "seed": 5,
        "skip_tokenizer_init": False,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "actors.rollout.vllm.worker.WorkerExtension",
        "distributed_executor_backend": "mp",
        "max_num_seqs": 7,
        "kv_cache_memory_bytes": 2**28,
        "enable_chunked_prefill": False,
        "block_size": 32,
    }
    start(tmp_path)
    names = ("load_format", "max_num_batched_tokens", "skip_tokenizer_init", "enforce_eager")
    assert [vllm.arguments[name] for name in names] == ["rl_backend", 8192, True, True]
    assert (vllm.arguments["kv_cache_memory_bytes"], vllm.arguments["distributed_executor_backend"]) == (2**30, "uni")


DELTANET = {"model_type": "qwen3_next"}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, {"enable_chunked_prefill": False, "block_size": 32}),
        ({}, {"engine_args": {"block_size": 64}}, {"enable_chunked_prefill": False, "block_size": 64}),
        ({"vision_config": {}}, {}, {"language_model_only": True, "enable_chunked_prefill": False, "block_size": 32}),
        (DELTANET, {}, {"mamba_ssm_cache_dtype": "float32", "enable_chunked_prefill": True}),
        (DELTANET, {"prefix_caching": False}, {"mamba_ssm_cache_dtype": "float32", "enable_chunked_prefill": False}),
        (LATENT, {}, {"attention_backend": "CPU_MLA", "enable_chunked_prefill": False}),
        (
            LATENT,
            {"engine_args": {"attention_backend": "OTHER"}},
            {"attention_backend": "OTHER", "enable_chunked_prefill": False},
        ),
    ],
)
def test_kinds_of_models_are_served_in_their_own_way(
    vllm: Started, tmp_path: Path, fields: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    start(tmp_path, fields=fields, **settings)
    names = "language_model_only", "mamba_ssm_cache_dtype", "attention_backend", "enable_chunked_prefill", "block_size"
    assert {name: vllm.arguments[name] for name in names if name in vllm.arguments} == expected
    served = {**fields, "scoring_func": "sigmoid", "topk_method": "noaux_tc"} if fields is LATENT else None
    assert vllm.served_config == served
    if served:
        assert not Path(vllm.arguments["hf_config_path"]).exists()
        start(tmp_path, fields=fields, engine_args={"hf_config_path": str(tmp_path)})
        assert vllm.arguments["hf_config_path"] == str(tmp_path), "the caller's own"


@pytest.mark.parametrize("gib", [None, 0.5])
def test_engines_on_a_gpu_fill_a_share_of_its_memory_or_what_they_are_told(
    vllm: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float | None
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "device_type", "cuda")
    share = {} if gib else {"gpu_memory_utilization": 0.4}
    start(tmp_path, "cuda", fields=LATENT, kv_cache_gib=gib, sleep_mode=True, **share)
    assert vllm.arguments["gpu_memory_utilization"] == (0.9 if gib else 0.4) and vllm.arguments["enable_sleep_mode"] is True
    assert vllm.arguments["enforce_eager"] is False, "a GPU waits for launches"
    assert vllm.arguments.get("kv_cache_memory_bytes") == (2**29 if gib else None)
    assert not vllm.arguments.keys() & {"enable_chunked_prefill", "attention_backend", "block_size"}


ATTENTION = ["qkv_proj", "o_proj"]
MIXER = ["in_proj_qkvz", "in_proj_ba", "out_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("device", "fields", "is_moe", "targets"),
    [
        ("cpu", {}, False, None),
        ("cpu", {}, True, ATTENTION),
        ("cpu", DELTANET, False, [*ATTENTION, *MIXER, "embed_tokens", "lm_head"]),
        ("cpu", DELTANET, True, [*ATTENTION, *MIXER, "shared_expert_gate", "expert_gate"]),
        ("cuda", DELTANET, True, None),
    ],
)
def test_engines_have_slots_for_adapters_of_the_modules_that_a_device_serves(
    vllm: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    fields: dict[str, Any],
    is_moe: bool,
    targets: list[str] | None,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "device_type", device)
    vllm.is_moe = is_moe
    for rank, kept in ((16, 16), (17, 32), (1, 1), (9, 16)):
        start(tmp_path, device, fields=fields, max_adapters=3, max_adapter_rank=rank)
        slots = 5 if device == "cpu" else 4
        found = {name: vllm.arguments[name] for name in ("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank")}
        assert found == {"enable_lora": True, "max_loras": slots, "max_cpu_loras": slots, "max_lora_rank": kept}
        assert vllm.arguments.get("lora_target_modules") == targets
        assert vllm.arguments.get("enable_moe_shared_loras", False) is (device == "cuda")
    start(tmp_path, device, fields=fields)
    assert not any("lora" in name for name in vllm.arguments)


def test_what_vllm_cannot_be_started_with_is_refused_first(
    vllm: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        UnsupportedError, match=r"device='cuda': the vLLM that is installed runs on 'cpu'; install the build"
    ):
        start(tmp_path, "cuda")
    with pytest.raises(UnsupportedError, match=r"return_routed_experts=True: \S+ has no experts; leave it out for a dense"):
        start(tmp_path, return_routed_experts=True)
    assert not vllm.arguments
    vllm.is_moe = True
    start(tmp_path, return_routed_experts=True)
    assert vllm.arguments["enable_return_routed_experts"] is True
    vllm.dtypes = [["float32"], ["bfloat16", "float16"]]
    with pytest.raises(RolloutError, match="keeps recurrent states in bfloat16, float16 though") as rounding:
        start(tmp_path)
    assert rounding.value.details["dtypes"] == ["bfloat16", "float16"]

    def damaged(path: str) -> None:
        raise CheckpointError(f"{path} is damaged")

    vllm.dtypes = []
    monkeypatch.setattr(process, "require_same_head", damaged)
    with pytest.raises(CheckpointError, match="is damaged"):
        start(tmp_path)
    start(tmp_path, load_format="dummy")


def test_what_vllm_refuses_is_said_in_a_sentence_with_its_traceback_beside_it(vllm: Started, tmp_path: Path) -> None:
    vllm.error = ValueError("max_lora_rank is too\n  large, see --max-num-batched-tokens")
    with pytest.raises(RolloutError) as refused:
        start(tmp_path)
    said = "RolloutConfig.max_adapter_rank is too large, see RolloutConfig.max_num_batched_tokens"
    assert str(refused.value) == f"vLLM does not start with {tmp_path}: {said}"
    assert refused.value.__cause__ is vllm.error and "Traceback (most recent" in refused.value.details["traceback"]
    vllm.error = UnsupportedError("our own")
    with pytest.raises(UnsupportedError, match=r"^our own$"):
        start(tmp_path)


def test_long_texts_end_with_dots_and_only_whole_names_are_ours() -> None:
    assert in_our_words(ValueError("x" * 400)) == "x" * 400
    assert in_our_words(ValueError("y" * 401)) == "y" * 400 + "..."
    text = "my_max_model_len max_model_lens x.enforce_eager model seed dtype --enable-lora enable_lora."
    ours = "my_max_model_len max_model_lens x.enforce_eager model seed dtype RolloutConfig.max_adapters"
    assert in_our_words(ValueError(text)) == f"{ours} RolloutConfig.max_adapters."
