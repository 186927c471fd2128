from __future__ import annotations

import importlib
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rl_backend
from rl_backend.contracts import (
    BackendConfig,
    BaseConfig,
    ConfigError,
    NativeConfig,
    OptimizerConfig,
    ParallelConfig,
    RegistryError,
    RuntimeConfig,
    TensorInfo,
    WeightManifest,
)
from tests.support.unigram_runtime import UnigramConfig

FULL: dict[str, dict[str, Any]] = {
    "ParallelConfig": {"tp": 2, "pp": 4, "vpp": 2, "cp": 2, "ep": 2, "etp": 1},
    "OptimizerConfig": {
        "lr": 3e-4,
        "min_lr": 1e-5,
        "betas": (0.8, 0.95),
        "lr_decay_style": "WSD",
        "lr_decay_steps": 100,
        "lr_wsd_decay_steps": 10,
    },
    "TensorInfo": {"name": "w", "shape": (2, 3), "dtype": "bfloat16", "nbytes": 12, "digest": "00ff"},
    "TensorPart": {
        "name": "w",
        "shape": (1, 3),
        "dtype": "bfloat16",
        "nbytes": 6,
        "whole": (2, 3),
        "start": (1, 0),
        "rank": 1,
    },
    "TensorTile": {
        "name": "w[1:2, 0:3]",
        "shape": (1, 3),
        "dtype": "bfloat16",
        "nbytes": 6,
        "tensor": "w",
        "whole": (2, 3),
        "start": (1, 0),
        "workers": (0, 1),
    },
    "WeightManifest": {"version": 3, "tensors": (TensorInfo(name="w", shape=(), dtype="float32", nbytes=4),)},
    "TrainingManifest": {
        "model_type": "qwen3",
        "parameters": {"norm.weight": (64,)},
        "weight_version": 2,
        "schedule_steps": 3,
        "optimizer_steps": 4,
        "fewer_steps": {"norm.weight": 1},
        "world_size": 2,
        "runtime_config": {"hf_path": "x"},
        "extra": {"epoch": 1},
        "files": {"__0_0.distcp": {"num_bytes": 12, "xxh3": "00ff"}},
    },
    "TenantFacts": {"config": {"rank": 4, "targets": ["attention"]}, "base": "00ff", "num_draws": 3},
    "FileFacts": {"num_bytes": 12, "xxh3": "00ff"},
    "RunManifest": {"step": 3, "state": {"taken": 3}, "files": {"policy/manifest.json": {"num_bytes": 12, "xxh3": "00ff"}}},
    "BridgeConfig": {
        "parallel": ParallelConfig(tp=2),
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn",),
        "override_transformer_config": {"attention_softmax_in_fp32": True},
        "override_ddp_config": {"average_in_collective": True},
    },
    "ParitySide": {
        "runtime": "bridge",
        "parallel": ParallelConfig(tp=2, ep=2),
        "dp": 2,
        "options": {"log_prob_chunk_tokens": 256},
    },
    "ParityConfig": {
        "model": "/models/tiny",
        "reference": {"runtime": "transformers", "options": {"attn_implementation": "sdpa"}},
        "candidate": {"runtime": "native"},
        "lr": 1e-3,
    },
    "RewardConfig": {
        "functions": {"exact": {"function": "mine.py:exact", "weight": 2.0}, "short": {"function": "mine.py:short"}},
        "timeout_seconds": 3.0,
        "on_failure": "drop",
    },
    "WeightedReward": {"function": "mine.py:exact", "weight": 0.5},
    "RuntimeConfig": {
        "hf_path": "/models/tiny",
        "seed": 7,
        "backend_cfg": NativeConfig(device="cpu", log_prob_chunk_tokens=3, optimizer=OptimizerConfig(clip_grad=0.0)),
    },
}


def config_classes() -> list[type[BaseConfig]]:
    for module in pkgutil.walk_packages(rl_backend.__path__, "rl_backend."):
        if not module.name.startswith("rl_backend.cli"):
            importlib.import_module(module.name)

    def walk(base: type[BaseConfig]) -> Iterator[type[BaseConfig]]:
        for subclass in base.__subclasses__():
            yield subclass
            yield from walk(subclass)

    found = {entry for entry in walk(BaseConfig) if entry.__module__.startswith("rl_backend.")}
    return sorted([*found, UnigramConfig], key=lambda entry: entry.__name__)


def example(config_class: type[BaseConfig]) -> BaseConfig:
    """An instance; a class with required fields needs its values in FULL."""
    return config_class(**FULL.get(config_class.__name__, {}))


@pytest.mark.shows("contracts: configurations survive JSON and pickle, third-party options included")
@pytest.mark.parametrize("config_class", config_classes())
def test_every_configuration_survives_json_and_pickle_unchanged(config_class: type[BaseConfig]) -> None:
    config = example(config_class)
    for other in (
        config_class.model_validate_json(config.model_dump_json()),
        config_class.model_validate(config.model_dump()),
        pickle.loads(pickle.dumps(config)),
    ):
        assert type(other) is config_class
        assert other == config
        for name in config_class.model_fields:
            assert type(getattr(other, name)) is type(getattr(config, name))


@pytest.mark.shows("contracts: unknown fields are refused by name")
@pytest.mark.parametrize("config_class", config_classes())
def test_every_configuration_refuses_an_unknown_field_by_name_and_lists_its_own(config_class: type[BaseConfig]) -> None:
    arguments = FULL.get(config_class.__name__, {})
    with pytest.raises(ConfigError, match=rf"{config_class.__name__}\.learning_speed=1: unknown field") as raised:
        config_class(**arguments, learning_speed=1)
    for name in config_class.model_fields:
        assert name in str(raised.value)


@pytest.mark.parametrize("config_class", config_classes())
def test_every_configuration_is_frozen(config_class: type[BaseConfig]) -> None:
    config = example(config_class)
    for name in config_class.model_fields:
        with pytest.raises(Exception, match=r"[Ff]rozen"):
            setattr(config, name, None)


def test_the_options_of_a_registered_runtime_survive_with_their_type() -> None:
    config = RuntimeConfig(backend="unigram", hf_path="x", backend_cfg=UnigramConfig(vocab_size=9))
    for other in (
        RuntimeConfig.model_validate_json(config.model_dump_json()),
        pickle.loads(pickle.dumps(config)),
        RuntimeConfig(backend="unigram", hf_path="x", backend_cfg={"vocab_size": 9}),
        config.replace(seed=0),
    ):
        assert other == config
        assert type(other.backend_cfg) is UnigramConfig


def test_a_process_that_knows_only_the_configuration_finds_the_runtime_through_its_plugins() -> None:
    config = RuntimeConfig(
        plugins=("tests.support.unigram_runtime",), backend="unigram", hf_path="x", backend_cfg=UnigramConfig(vocab_size=9)
    )
    program = f"""
import sys
from rl_backend.contracts import RuntimeConfig
from rl_backend.runtime import create_runtime
config = RuntimeConfig.model_validate_json({config.model_dump_json()!r})
print(type(create_runtime(config)).__name__, config.backend_cfg.vocab_size)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split() == ["UnigramRuntime", "9"], ran.stderr


def test_a_plugin_that_a_rank_cannot_import_says_so_with_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("register_model(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RANK", "3")
    message = r"plugins='broken_plugin': fails when training rank 3, process \d+ on node \S+ imports it \(NameError: "
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(hf_path="m", plugins=("broken_plugin",))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"backend": "magic"}, RegistryError, r"unknown runtime 'magic'; known: .*native.*register_runtime"),
        (
            {"plugins": ("no.such.module",)},
            ConfigError,
            r"plugins='no.such.module': cannot be imported by process \d+ on node \S+ \(No module.*working_dir$",
        ),
        ({"backend_cfg": {"devise": "cpu"}}, ConfigError, r"NativeConfig.devise='cpu': unknown field"),
        ({"backend_cfg": UnigramConfig()}, ConfigError, r"NativeConfig=.*valid dictionary or instance of NativeConfig"),
        ({"backend_cfg": 3}, ConfigError, r"NativeConfig=3: .*valid dictionary or instance of NativeConfig"),
        ({"hf_path": ""}, ConfigError, r"RuntimeConfig.hf_path"),
        ({"max_tokens_per_micro_batch": 0}, ConfigError, r"RuntimeConfig.max_tokens_per_micro_batch=0"),
        ({"backend_cfg": {"model_cfg": {}}}, ConfigError, r"NativeConfig.model_cfg.*name the family in `model`"),
        ({"backend_cfg": {"pipeline_schedule": "zbh1"}}, ConfigError, r'NativeConfig.pipeline_schedule="zbh1": .*zbv'),
    ],
)
def test_a_runtime_configuration_that_cannot_work_is_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RuntimeConfig(**{"hf_path": "x", **arguments})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ConfigError, match=r"RuntimeConfig\.hf_path: required field is missing"):
        RuntimeConfig()  # type: ignore[call-arg]


def test_the_backend_configuration_has_its_defaults_when_none_is_given() -> None:
    assert RuntimeConfig(hf_path="x").backend_cfg == NativeConfig()
    assert isinstance(RuntimeConfig(hf_path="x", backend="unigram").backend_cfg, UnigramConfig)
    assert issubclass(NativeConfig, BackendConfig)


def test_the_data_parallel_size_follows_from_the_world_size() -> None:
    layout = ParallelConfig(tp=2, pp=2, cp=2)
    assert layout.model_parallel_size == 8
    assert layout.data_parallel_size(8) == 1
    assert layout.data_parallel_size(24) == 3
    assert ParallelConfig(ep=4).data_parallel_size(8) == 8


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        (ParallelConfig(tp=2, pp=2), 6, r"world size 6 is not a multiple of tp\*pp\*cp = 2\*2\*1 = 4; use 4 or 8 ranks"),
        (ParallelConfig(tp=4), 2, r"world size 2 is not a multiple of tp\*pp\*cp = 4\*1\*1 = 4; use 4 ranks"),
        (ParallelConfig(tp=3, ep=2), 9, r"world size 9 is not a multiple of ep\*etp\*pp = 2\*1\*1 = 2; use 6 or 12 ranks"),
    ],
)
def test_a_world_size_that_does_not_divide_is_refused_with_the_arithmetic(
    layout: ParallelConfig, world_size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layout.data_parallel_size(world_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, r"ParallelConfig\.tp=0"),
        ({"tp": 1.5}, r"ParallelConfig\.tp=1\.5"),
    ],
)
def test_a_layout_that_cannot_exist_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": (0.9, 1.0)}, r"OptimizerConfig\.betas=\(0\.9, 1\.0\): each must be in \[0, 1\)"),
        (
            {"lr": 1e-3, "min_lr": 1e-2, "lr_decay_style": "linear", "lr_decay_steps": 5},
            r"OptimizerConfig\.min_lr=0\.01: must not exceed lr=0\.001",
        ),
        ({"lr_warmup_init": 1.0, "lr_warmup_steps": 2}, r"OptimizerConfig\.lr_warmup_init=1\.0: must not exceed"),
        ({"lr": float("nan")}, r"OptimizerConfig\.lr=NaN"),
        ({"lr": -1.0}, r"OptimizerConfig\.lr=-1\.0"),
        ({"lr_decay_style": "linear"}, r"lr_decay_style='linear': needs lr_decay_steps or total_training_steps"),
        ({"lr_decay_style": "cosine", "lr_warmup_steps": 5, "lr_decay_steps": 5}, r"lr_warmup_steps=5: must be less"),
        ({"lr_decay_style": "WSD", "lr_decay_steps": 5}, r"lr_wsd_decay_steps=None.*WSD"),
        ({"lr_warmup_steps_ratio": 0.1}, r"lr_warmup_steps_ratio=0\.1: needs total_training_steps"),
        ({"weight_decay_incr_style": "linear"}, r"weight_decay_incr_style='linear': needs total_training_steps"),
        ({"lr_decay_style": "steep"}, r"OptimizerConfig\.lr_decay_style=\"steep\""),
        ({"optimizer": "sgd"}, r"OptimizerConfig\.optimizer=\"sgd\""),
    ],
)
def test_an_optimizer_that_cannot_work_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**arguments)


def test_warm_up_and_decay_steps_are_resolved_from_the_length_of_the_run() -> None:
    assert OptimizerConfig(lr_warmup_steps_ratio=0.1, total_training_steps=50).warmup_steps == 5
    assert OptimizerConfig(total_training_steps=50).decay_steps == 50
    assert OptimizerConfig(total_training_steps=50, lr_decay_steps=40, lr_decay_style="linear").decay_steps == 40
    assert OptimizerConfig().decay_steps is None


def test_a_copy_with_changes_is_validated() -> None:
    assert ParallelConfig(tp=2).replace(pp=2) == ParallelConfig(tp=2, pp=2)
    with pytest.raises(ConfigError, match=r"ParallelConfig\.pp"):
        ParallelConfig(pp=2, vpp=2).replace(pp=0)


def test_a_manifest_that_names_a_tensor_twice_is_refused() -> None:
    info = TensorInfo(name="w", shape=(2,), dtype="float32", nbytes=8)
    assert WeightManifest(version=0, tensors=(info,)).nbytes == 8 and info.num_elements == 2
    with pytest.raises(ConfigError, match=r"WeightManifest\.tensors=\['w'\]: each name may be sent once"):
        WeightManifest(version=0, tensors=(info, info))
