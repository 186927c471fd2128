"""Options that Megatron would ignore, and a Megatron that is missing, are refused in one sentence."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import BridgeConfig, ConfigError, ParallelConfig, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge import installed
from tests.support.bridge_runs import open_bridge
from tests.support.moe import write_moe

REFUSED_AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "a layout": ({"override_transformer_config": {"tensor_model_parallel_size": 2}}, "BridgeConfig.parallel.tp"),
    "a precision": ({"override_transformer_config": {"bf16": True}}, "BridgeConfig.param_dtype"),
    "a learning rate": ({"override_optimizer_config": {"lr": 1.0}}, "BridgeConfig.optimizer.lr"),
    "skipping by size": ({"override_optimizer_config": {"grad_norm_skip_threshold": 3.0}}, "not finite only"),
    "no distributed optimizer": ({"override_ddp_config": {"use_distributed_optimizer": False}}, "the runtime"),
    "a method without granularity": ({"recompute_method": "block"}, "recompute_granularity='full'"),
    "modules of a full recomputation": (
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
            "recompute_modules": ["mlp"],
        },
        "recompute_granularity='selective'",
    ),
    "full without a number of layers": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        "recompute_num_layers",
    ),
}
REFUSED_WHEN_BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field of the model": ({"override_transformer_config": {"num_layer": 2}}, "num_layer.*no such field"),
    "an unknown field of DDP": ({"override_ddp_config": {"overlap": True}}, "overlap.*no such field"),
    "an unknown field of the optimizer": ({"override_optimizer_config": {"momentum": 0.1}}, "momentum.*no such field"),
    "a kernel of Transformer Engine": (
        {"override_transformer_config": {"apply_rope_fusion": True}},
        "apply_rope_fusion.*Transformer Engine",
    ),
    "experts of a dense model": ({"override_transformer_config": {"moe_aux_loss_coeff": 0.1}}, "no experts"),
    "a value that Megatron refuses": (
        {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}},
        "Megatron refuses",
    ),
}


@pytest.mark.shows("bridge: overrides that Megatron would ignore, or that an option decides, are refused by name")
@pytest.mark.parametrize("case", REFUSED_AT_ONCE)
def test_an_option_that_cannot_hold_is_refused_when_the_configuration_is_built(case: str) -> None:
    options, message = REFUSED_AT_ONCE[case]
    with pytest.raises(ConfigError, match=message):
        BridgeConfig(**options)


@pytest.mark.parametrize("case", REFUSED_WHEN_BUILT)
def test_an_override_that_megatron_would_ignore_is_refused_before_weights_are_read(case: str, tied_model: Path) -> None:
    options, message = REFUSED_WHEN_BUILT[case]
    with open_bridge(tied_model, **options) as runtime, pytest.raises(ConfigError, match=message):
        runtime.build_model()


def test_a_layout_that_does_not_fit_the_world_is_refused(tied_model: Path) -> None:
    with pytest.raises(ConfigError, match="world size 1 is not a multiple of tp"), open_bridge(tied_model, {"tp": 2}):
        pass


def test_an_override_reaches_megatron(tmp_path: Path) -> None:
    path = write_moe("qwen3_moe", tmp_path / "model")
    with open_bridge(
        path,
        override_transformer_config={"moe_router_topk": 1, "moe_router_pre_softmax": True},
        override_ddp_config={"grad_reduce_in_fp32": False},
        override_optimizer_config={"decoupled_weight_decay": False},
        recompute_granularity="selective",
        recompute_modules=["core_attn", "mlp"],
    ) as runtime:
        handle = runtime.build_model()
        assert handle.models[0].config.moe_router_topk == 1
        assert handle.models[0].config.recompute_modules == ["core_attn", "mlp"]
        assert handle.chunks[0].ddp_config.grad_reduce_in_fp32 is False
        assert handle.trainer("test").megatron.config.decoupled_weight_decay is False


def test_the_configuration_survives_a_dump() -> None:
    config = RuntimeConfig(
        backend="bridge",
        hf_path="model",
        backend_cfg=BridgeConfig(parallel=ParallelConfig(tp=2), override_ddp_config={"bucket_size": 4}),
    )
    assert RuntimeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.shows("bridge: a missing or other Megatron is one sentence that says what to install")
@pytest.mark.parametrize("distribution", ["megatron-core", "megatron-bridge"])
@pytest.mark.parametrize("version", [None, "0.1.0"])
def test_a_missing_or_other_megatron_is_named(
    distribution: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name != distribution:
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(UnsupportedError, match=f"{distribution}.*pip install") as refused:
        installed.import_megatron()
    assert "\n" not in str(refused.value)
