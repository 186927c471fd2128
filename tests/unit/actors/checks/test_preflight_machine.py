"""Packages, devices, cores and memory of a machine that the test makes up."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from actors.checks import machine
from actors.checks.machine import faster_dtype, find_devices, find_packages, is_on_cluster, require_engines
from actors.checks.model import find_lengths, find_model, runtime_of
from actors.checks.preflight import Check, check_start, findings, kept_choice, preflight
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import RolloutConfig
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.lab.plan.make import GIB


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with cores 2, 3, 5 and 7, without GPUs."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 2, 5, 3})
    monkeypatch.setattr(machine, "check_served", lambda engines, device: None)
    config: dict[str, Any] = {"num_attention_heads": 12}
    monkeypatch.setattr(machine, "read_hf_config", lambda path: config if path == "m" else {"text_config": {}})
    gpus(monkeypatch, 0)


def gpus(monkeypatch: pytest.MonkeyPatch, number: int, gib: float = 1.0) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(gib * GIB)))


def config_of(kind: Any = GRPOConfig, **changes: Any) -> Any:
    sizes = {} if kind is SFTConfig else {"reward": "r", "prompts_per_step": 32}
    return kind(**{"model": "m", "dataset": "d", **sizes, **changes})


def test_packages_are_those_of_the_runtime_and_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(machine, "require_installed", lambda: asked.append("Megatron"))
    assert find_packages(config_of()) == "torch, ray, vllm" and not asked
    assert find_packages(config_of(backend="bridge")) == "torch, ray, Megatron, vllm" and asked
    assert find_packages(config_of(SFTConfig)) == "torch, ray"
    without, samples, elsewhere = config_of(SFTConfig), config_of(), config_of(rollout={"py_executable": sys.executable})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_packages(without) == "torch, ray"
    for find in (lambda: find_packages(samples), lambda: require_engines(RolloutConfig(model_path="m"))):
        with pytest.raises(UnsupportedError, match=r"^vllm is not installed, which samples responses; pip install"):
            find()
    # Engines of another environment have vLLM there.
    assert find_packages(elsewhere) == "torch, ray, vllm"
    missing = RolloutConfig(model_path="m", py_executable="/nowhere/python")
    with pytest.raises(ConfigError, match=r"RolloutConfig\.py_executable='/nowhere/python': it cannot be run"):
        require_engines(missing)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert is_on_cluster() and find_packages(samples) == "packages are those of the cluster's machines"
    require_engines(RolloutConfig(model_path="m", device="cuda"))


@pytest.mark.parametrize(
    ("number", "changes", "found"),
    [
        (0, {}, "4 cores, 0 GPUs for 1 rank(s) and 1 engine(s)"),
        (1, {}, "4 cores, 1 GPUs for 1 rank(s) and 1 engine(s)"),
        (5, {"ranks": 3, "engines": 2, "transport": "nccl"}, "4 cores, 5 GPUs for 3 rank(s) and 2 engine(s)"),
        (0, {"rollout.tensor_parallel": 4}, "4 cores, 0"),
        (0, {"rollout.tensor_parallel": 2, "max_staleness": 1, "importance": "off"}, "4 cores"),
        (0, {"model": "other", "rollout.tensor_parallel": 4}, "4 cores"),
        (0, {"rollout.cores": [[2, 7], [3]], "engines": 2}, "4 cores"),
        (0, {"rollout.cores_per_engine": 4}, "4 cores"),
    ],
    ids=str,
)
def test_devices_are_divided_over_ranks_and_engines(
    monkeypatch: pytest.MonkeyPatch, number: int, changes: Any, found: str
) -> None:
    gpus(monkeypatch, number)
    assert find_devices(config_of(**changes)).startswith(found)


@pytest.mark.parametrize(
    ("number", "changes", "message"),
    [
        (4, {"ranks": 3, "engines": 2}, r"^GRPOConfig\.ranks=3: 3 training ranks, of all groups, and 2 engines take a GPU"),
        (3, {"ranks": 4, "engines": 4, "colocate": True}, r"^GRPOConfig\.ranks=4: .* has 3: ask for a rank for each GPU"),
        (
            2,
            {"ranks": 2, "colocate": True, "rollout.tensor_parallel": 2},
            r"^RolloutConfig\.tensor_parallel=2: .* gpus_per_worker=0\.4 is a share of one; use 1, or a GPU for each",
        ),
        (1, {"rollout.tensor_parallel": 2}, r"^RolloutConfig\.tensor_parallel=2: .* gpus_per_worker=0\.5 is a share of one"),
        (1, {"engines": 2}, r"^GRPOConfig\.ranks=1: .*the cluster has 1: ask for fewer"),
        (2, {"train.backend_cfg.device": "cpu"}, r"^NativeConfig\.device='cpu': PyTorch sees 2 GPUs on this"),
        (0, {"train.backend_cfg.device": "cuda"}, r"^NativeConfig\.device='cuda': PyTorch sees 0 GPUs"),
        (2, {"rollout.device": "cpu", "transport": "cuda_ipc"}, r"^GRPOConfig\.transport='cuda_ipc': sends from GPU to GPU"),
        (0, {"transport": "nccl"}, r"^GRPOConfig\.transport='nccl'"),
        (0, {"rollout.tensor_parallel": 5}, r"tensor_parallel=5: does not divide num_attention_heads=12 of m; use 4 or 6$"),
        (
            0,
            {"rollout.tensor_parallel": 4, "max_staleness": 1, "importance": "off"},
            r"tensor_parallel=4: each engine has 2 of this machine's 4 cores, which it must divide; use 2",
        ),
        (0, {"rollout.tensor_parallel": 3}, r"tensor_parallel=3: each engine has 4 of this machine's 4 cores"),
        (0, {"rollout.tensor_parallel": 4, "engines": 2}, r"tensor_parallel=4: each engine has 2 of"),
        (0, {"rollout.cores": [[2, 6], [9]], "engines": 2}, r"cores=\[6, 9\]: this process may only use cores \[2, 3, 5, 7"),
        (0, {"rollout.cores_per_engine": 5}, r"cores_per_engine=5: this machine has 4 cores; use at most that"),
        (0, {"rollout.gpus_per_worker": 0.5}, r"gpus_per_worker=0\.5: applies to GPU engines only"),
        (0, {"rollout.engine_args": {"zzz": 1, "max_num_seq": 2}}, r"=\['max_num_seq', 'zzz'\]: .*max_num_seqs\?"),
    ],
    ids=str,
)  # fmt: skip
def test_devices_that_are_not_here_are_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, changes: Any, message: str
) -> None:
    gpus(monkeypatch, number)
    with pytest.raises(ConfigError, match=message):
        find_devices(config_of(**changes))


def test_ranks_of_all_groups_take_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    config = config_of(PPOConfig, groups="each", ranks=2)
    with pytest.raises(ConfigError, match=r"^PPOConfig\.ranks=2: 4 training ranks, of all groups, and 1 engines"):
        find_devices(config)
    gpus(monkeypatch, 5)
    assert find_devices(config) == "4 cores, 5 GPUs for 4 rank(s) and 1 engine(s)"
    with pytest.raises(
        ConfigError, match=r"^RolloutConfig\.num_engines=6: each takes a GPU, and this machine has 5; use at"
    ):
        require_engines(RolloutConfig(model_path="m", num_engines=6))
    require_engines(RolloutConfig(model_path="m", num_engines=5))


def test_checks_are_made_in_order_and_those_of_a_session_or_of_the_run_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def check(name: str, **facts: bool) -> Check:
        def find(config: Any) -> str:
            made.append(name)
            if name in refusing:
                raise ConfigError(f"no {name}")
            return f"a {name}"

        return Check(name, find, **facts)

    refusing: list[str] = []
    checks = (check("a"), check("b", of_machine=True), check("c", read_by_run=True), check("d"))
    monkeypatch.setattr("actors.checks.preflight.CHECKS", checks)
    monkeypatch.setattr("actors.options.config.local_model", lambda model, field: model)
    config = config_of()
    assert [(found.name, found.text, found.error) for found in preflight(config)] == [(n, f"a {n}", None) for n in "abcd"]
    for is_open, names in ((False, "abd"), (True, "ad")):
        made.clear()
        check_start(config, session_is_open=is_open)
        assert made == [*names]
    refusing += ["b", "d"]
    found = list(findings(config))
    assert [(each.text, str(each.error)) for each in found] == [
        ("a a", "None"),
        ("no b", "no b"),
        ("a c", "None"),
        ("no d", "no d"),
    ]
    assert all(0 <= each.seconds < 5 for each in found)
    with pytest.raises(ConfigError, match=r"^no b$"):
        preflight(config)


def test_a_processor_that_multiplies_bfloat16_faster_is_told_of_where_the_dtype_is_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = {"num_attention_heads": 12, "hidden_size": 256}
    monkeypatch.setattr(machine, "read_hf_config", lambda path: model)
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 2.24)
    config = config_of()
    assert faster_dtype(config) == ["--dtype bfloat16 multiplies 2.2x as fast here"]
    assert find_devices(config).endswith("engine(s), --dtype bfloat16 multiplies 2.2x as fast here")
    assert faster_dtype(config_of(dtype="float32")) == []
    assert faster_dtype(config_of(**{"train.backend_cfg.param_dtype": "float32"})) == []
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 1.1)
    assert faster_dtype(config) == []
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 2.0)
    model["hidden_size"] = 64
    assert faster_dtype(config) == [], "a step of a small model is not made of products"


@pytest.mark.parametrize(
    ("features", "measured"), [(("avx2", "avx512_bf16"), True), (("amx_bf16",), True), (("avx2",), False)]
)
def test_only_processors_with_an_instruction_for_bfloat16_are_measured(
    monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], measured: bool
) -> None:
    dtypes: list[torch.dtype] = []
    monkeypatch.setattr(machine, "cpu_features", lambda: features)
    monkeypatch.setattr(torch, "mm", lambda a, b: dtypes.append(a.dtype) or a)
    speedup = machine.bfloat16_speedup.__wrapped__()
    assert set(dtypes) == ({torch.float32, torch.bfloat16} if measured else set())
    assert speedup > 0 if measured else speedup == 1.0


def test_engines_with_cores_of_their_own_are_on_them_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 3)
    checked: list[str] = []
    monkeypatch.setattr(machine, "check_served", lambda engines, device: checked.append(device))
    assert find_devices(config_of(**{"rollout.cores": [[2, 7]]})).startswith("4 cores, 3 GPUs")
    with pytest.raises(ConfigError, match=r"transport='nccl': sends from GPU to GPU"):
        find_devices(config_of(**{"rollout.cores": [[2, 7]], "transport": "nccl"}))
    with pytest.raises(ConfigError, match=r"cores=\[6\]: this process may only use"):
        find_devices(config_of(**{"rollout.cores": [[6]]}))
    find_devices(config_of(transport="nccl"))
    find_devices(config_of(**{"rollout.device": "cpu"}))
    assert checked == ["cpu", "cpu", "cpu", "cuda", "cpu"]


def test_arguments_of_another_environment_s_engines_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_vllm_arguments", lambda: frozenset({"max_num_seqs"}))
    for changes, refused in (
        ({"rollout.engine_args": {"max_num_seqs": 1}}, False),
        ({"rollout.engine_args": {"mine": 1}}, True),
        ({"rollout.engine_args": {"mine": 1}, "rollout.py_executable": sys.executable}, False),
    ):
        with pytest.raises(ConfigError, match="leave it out") if refused else nullcontext():
            find_devices(config_of(**changes))
    monkeypatch.setattr(machine, "_vllm_arguments", frozenset)
    find_devices(config_of(**{"rollout.engine_args": {"mine": 1}}))


def test_cores_of_engines_are_divided_beside_ranks_only_where_these_compute_meanwhile() -> None:
    for changes, refused in (
        ({"engines": 2}, False),
        ({"engines": 2, "max_staleness": 1}, True),
        ({"engines": 2, "max_staleness": 1, "rollout.cores_per_engine": 2}, False),
        ({"engines": 2, "rollout.cores": [[2, 3], [5, 7]], "max_staleness": 1}, False),
    ):
        with pytest.raises(ConfigError, match="each engine has 1 of this machine's 4 cores") if refused else nullcontext():
            find_devices(config_of(**{"rollout.tensor_parallel": 2}, **changes))


@pytest.mark.parametrize("where", ["a cluster", "GPUs"])
def test_nothing_is_said_of_the_processor_of_a_machine_that_does_not_compute(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, Any] = {"text_config": {"hidden_size": 256}}
    monkeypatch.setattr(machine, "read_hf_config", lambda path: model)
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 9.0)
    config = config_of()
    assert len(faster_dtype(config)) == 1
    model["text_config"] = {"hidden_size": 255}
    assert faster_dtype(config) == []
    model["text_config"] = {"hidden_size": 256}
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 1.2)
    assert faster_dtype(config) == [], "that may be noise"
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 9.0)
    if where == "GPUs":
        gpus(monkeypatch, 1)
    else:
        monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert faster_dtype(config) == []


def test_engines_alone_take_a_gpu_each_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(machine, "check_served", lambda engines, device: checked.append(device))
    for number, engines in ((0, 4), (2, 2), (2, 1)):
        gpus(monkeypatch, number)
        require_engines(RolloutConfig(model_path="m", num_engines=engines))
    assert checked == ["cpu", "cuda", "cuda"]
    gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: each engine has 1 of this machine's 4 cores"):
        require_engines(RolloutConfig(model_path="m", num_engines=3, tensor_parallel=2))


def test_warnings_of_a_start_are_those_of_its_checks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"a": "warning: little memory", "b": "all is well", "c": "no warning: this", "d": "warning: another"}
    checks = tuple(Check(name, lambda config, text=text: text) for name, text in texts.items())  # type: ignore[misc]
    monkeypatch.setattr("actors.checks.preflight.CHECKS", checks)
    assert check_start(config_of(), session_is_open=False) == ["little memory", "another"]


@pytest.mark.parametrize(
    ("kept", "found"), [({"chosen": {"a": 1}}, {"a": 1}), ({"chosen": None}, {}), ({}, {}), ({"chosen": 3}, {})]
)
def test_what_a_run_had_chosen_is_in_the_state_of_its_checkpoint(kept: dict[str, Any], found: dict[str, Any]) -> None:
    start: Any = SimpleNamespace(progress=SimpleNamespace(state=kept))
    assert kept_choice(start) == found


def test_a_run_that_continues_is_checked_with_the_micro_batch_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def choose(config: Any, kept: Any) -> Any:
        tokens = kept.get("tokens", 4096)
        return SimpleNamespace(config=config if config.steps == 7 else config.replace(max_tokens_per_micro_batch=tokens))

    def look(config: Any) -> str:
        seen.append(config.train.max_tokens_per_micro_batch)
        return ""

    start = SimpleNamespace(progress=SimpleNamespace(state={"chosen": {"tokens": 2048}}))
    monkeypatch.setattr("actors.checks.preflight.CHECKS", (Check("a", look),))
    monkeypatch.setattr("actors.options.config.local_model", lambda model, field: model)
    monkeypatch.setattr("actors.checks.preflight.choose_micro_batch", choose)
    monkeypatch.setattr("actors.checks.preflight.find_start", lambda config: start)
    for changes in ({}, {"resume": "auto"}, {"resume": "auto", "steps": 7}):
        list(findings(config_of(**changes)))
    assert seen == [4096, 2048, 16384]

    def refuses(config: Any) -> Any:
        raise ConfigError("cannot be continued")

    monkeypatch.setattr("actors.checks.preflight.find_start", refuses)
    assert [each.error for each in findings(config_of(resume="auto"))] == [None] and seen[3:] == [4096]


def write_positions(folder: Path, **positions: int) -> dict[str, str]:
    for name, number in positions.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": number}))
    return {name: str(folder / name) for name in positions}


def test_the_shortest_of_all_models_bounds_sequences(tmp_path: Path) -> None:
    paths = write_positions(tmp_path, long=64, short=40)

    def lengths(prompt: int, response: int, **changes: Any) -> Any:
        sizes = {"max_prompt_tokens": prompt, "max_response_tokens": response}
        models = {"model": paths["long"], "critic_model": paths["short"]}
        return find_lengths(config_of(PPOConfig, **{**models, **sizes, **changes}))

    assert lengths(30, 10) == "sequences of up to 40 tokens, the model has 40 positions"
    with pytest.raises(ConfigError, match=r"PPOConfig\.max_prompt_tokens=31: \S+short has 40 .*; use at most 30"):
        lengths(31, 10)
    with pytest.raises(ConfigError, match=r"PPOConfig\.max_response_tokens=40: \S+short has 40 .*; use at most 39$"):
        lengths(1, 40)
    assert lengths(1, 39) == "sequences of up to 40 tokens, the model has 40 positions"
    with pytest.raises(ConfigError, match=r"RolloutConfig\.max_model_len=41: "):
        lengths(1, 39, **{"rollout.max_model_len": 41})
    assert find_lengths(config_of(SFTConfig, model=paths["short"])) == "the model has 40 positions"
    assert find_lengths(config_of(SFTConfig, model=str(tmp_path))) == "nothing limits the model"


def test_an_episode_is_as_long_as_the_model_at_most(tmp_path: Path) -> None:
    path = write_positions(tmp_path, m=40)["m"]
    options: dict[str, Any] = {"model": path, "dataset": "d", "player": "m:play", "run_dir": "x", "max_response_tokens": 9}
    assert find_lengths(EpisodeConfig(**options, max_episode_tokens=40)).startswith("sequences of up to 40 tokens")
    with pytest.raises(ConfigError, match=r"EpisodeConfig\.max_episode_tokens=41: .*; use at most 40$"):
        find_lengths(EpisodeConfig(**options, max_episode_tokens=41))


def test_every_model_and_plugin_of_a_run_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_positions(tmp_path, a=64, b=64)
    (tmp_path / "my_plugin_of_a_test.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(PPOConfig, model=paths["a"], critic_model=paths["b"], kl_coef=0.1, plugins="my_plugin_of_a_test")
    assert find_model(config) == (
        f"qwen3 in {paths['a']}, qwen3 in {paths['b']}, plugin my_plugin_of_a_test from {tmp_path}/my_plugin_of_a_test.py, "
        "which every node must have"
    )
    runtimes = [runtime_of(config, model).hf_path for model in config.models()]
    assert runtimes == [model.path for model in config.models()] and set(runtimes) == set(paths.values())
