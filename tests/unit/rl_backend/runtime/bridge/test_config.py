"""Options that Megatron would ignore, and a Megatron that is missing, are refused in one sentence."""

from __future__ import annotations

import importlib.metadata
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, ParallelConfig, RuntimeConfig, UnsupportedError
from rl_backend.runtime.bridge import installed
from rl_backend.runtime.bridge.checks import require_bridge
from rl_backend.runtime.bridge.config import NEEDS_TRANSFORMER_ENGINE, TRANSFORMER, BridgeConfig
from tests.support.bridge_runs import open_bridge
from tests.support.models import write_tiny
from tests.support.moe import write_moe

REFUSED_AT_ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "a layout": ({"override_transformer_config": {"tensor_model_parallel_size": 2}}, "BridgeConfig.parallel.tp"),
    "a precision": ({"override_transformer_config": {"bf16": True}}, "BridgeConfig.param_dtype"),
    "a learning rate": ({"override_optimizer_config": {"lr": 1.0}}, "BridgeConfig.optimizer.lr"),
    "a field that does not exist": ({"override_transformer_config": {"num_layer": 2}}, "num_layer.*does not exist"),
    "another architecture": ({"override_transformer_config": {"rotary_base": 5}}, "rotary_base.*config.json decides it"),
    "a field without effect": ({"override_optimizer_config": {"sgd_momentum": 0.1}}, "sgd_momentum.*no effect"),
    "a balancing loss of no type": (
        {"override_transformer_config": {"moe_aux_loss_coeff": 0.1}},
        "moe_aux_loss_coeff.*with 'moe_router_load_balancing_type'='none'",
    ),
    "a balancing loss of the type none": (
        {"override_transformer_config": {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "none"}},
        r"\['moe_aux_loss_coeff'\]=0\.1: .*with 'moe_router_load_balancing_type'='none'",
    ),
    "a balancing loss of a type that has none": (
        {"override_transformer_config": {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "sinkhorn"}},
        r"\['moe_aux_loss_coeff'\]=0\.1: .*with 'moe_router_load_balancing_type'='sinkhorn'",
    ),
    "one of several losses without a coefficient": (
        {
            "override_transformer_config": {
                "moe_aux_loss_coeff": [0.1, 0.0],
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            }
        },
        "moe_router_load_balancing_type.*without 'moe_aux_loss_coeff' above 0",
    ),
    "two losses and one coefficient": (
        {
            "override_transformer_config": {
                "moe_aux_loss_coeff": 0.1,
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            }
        },
        "expected one number for each of moe_router_load_balancing_type",
    ),
    "a type of balancing loss alone": (
        {"override_transformer_config": {"moe_router_load_balancing_type": "aux_loss"}},
        "moe_router_load_balancing_type.*without 'moe_aux_loss_coeff' above 0",
    ),
    "groups of an interleaved schedule without one": (
        {"parallel": {"pp": 2}, "override_transformer_config": {"microbatch_group_size_per_vp_stage": 4}},
        r"\['microbatch_group_size_per_vp_stage'\]=4: .*parallel\.vpp > 1",
    ),
    "spread activations": (
        {"parallel": {"tp": 2}, "override_transformer_config": {"distribute_saved_activations": True}},
        r"\['distribute_saved_activations'\]=True: this is decided by BridgeConfig\.parallel\.tp",
    ),
    "a kernel of layer norms": ({"override_transformer_config": {"persist_layer_norm": True}}, "have RMSNorm"),
    "overlap without tensor parallelism": (
        {"override_transformer_config": {"tp_comm_overlap": True}},
        r"\['tp_comm_overlap'\]=True: .*initialize_ub",
    ),
    "stages without a pipeline": (
        {"override_transformer_config": {"num_layers_in_first_pipeline_stage": 1}},
        r"parallel\.pp > 1",
    ),
    "half of an overlap": ({"override_ddp_config": {"overlap_param_gather": True}}, "without 'overlap_grad_reduce'"),
    "a coefficient that is no number": (
        {"override_transformer_config": {"moe_aux_loss_coeff": math.nan, "moe_router_load_balancing_type": "aux_loss"}},
        r"\['moe_aux_loss_coeff'\]=nan: expected a finite number",
    ),
    "a coefficient of a list that is no number": (
        {"override_transformer_config": {"moe_aux_loss_coeff": [math.inf], "moe_router_load_balancing_type": ["aux_loss"]}},
        "expected a finite number",
    ),
    "a router loss that is no number": ({"override_transformer_config": {"moe_z_loss_coeff": math.nan}}, "finite number"),
    "a coefficient in text": (
        {"override_transformer_config": {"moe_aux_loss_coeff": "0.1", "moe_router_load_balancing_type": "aux_loss"}},
        r"\['moe_aux_loss_coeff'\]='0.1': expected a number",
    ),
    "a way of balancing that Megatron does not have": (
        {"override_transformer_config": {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "my_aux_losses"}},
        r"\['moe_router_load_balancing_type'\]='my_aux_losses': expected one of 'none', 'aux_loss'",
    ),
    "quantile balancing": (
        {"override_transformer_config": {"moe_router_load_balancing_type": "quantile_balancing"}},
        r"\['moe_router_load_balancing_type'\]='quantile_balancing': .*padding is marked.*expected one of 'none'",
    ),
    "quantile balancing among others": (
        {
            "override_transformer_config": {
                "moe_aux_loss_coeff": [0.1, 0.0],
                "moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"],
            }
        },
        "quantile balancing takes no batches",
    ),
    "sinkhorn in a list": (
        {"override_transformer_config": {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]}},
        r"\['moe_router_load_balancing_type'\]=\['sinkhorn'\]: Megatron would ignore 'sinkhorn' in a list",
    ),
    "skipping by size": ({"override_optimizer_config": {"grad_norm_skip_threshold": 3.0}}, "only steps that are not finite"),
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
    "several stages of a rank without a pipeline": ({"parallel": {"vpp": 2}}, r"parallel\.vpp=2: needs pp > 1, got pp=1"),
    "full without a number of layers": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        "recompute_num_layers",
    ),
}
REFUSED_WHEN_BUILT: dict[str, tuple[dict[str, Any], str]] = {
    "a kernel of Transformer Engine": (
        {"override_transformer_config": {"apply_rope_fusion": True}},
        "apply_rope_fusion.*Transformer Engine",
    ),
    "experts of a dense model": ({"override_transformer_config": {"moe_z_loss_coeff": 0.1}}, "no experts"),
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


def test_decay_of_norms_that_a_model_does_not_have_is_refused(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")
    decay = {"apply_wd_to_qk_layernorm": True}
    message = r"\['apply_wd_to_qk_layernorm'\]=True: this model has no norms of queries and keys"
    with (
        open_bridge(tmp_path / "model", override_optimizer_config=decay) as runtime,
        pytest.raises(ConfigError, match=message),
    ):
        runtime.build_model()


def test_overrides_of_megatrons_own_attention_are_refused_where_it_is_not_used() -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.model.provider import check_overrides_of_model

    provider = SimpleNamespace(
        masked_softmax_fusion=True, attention_softmax_in_fp32=True, num_moe_experts=None, qk_layernorm=True
    )
    for value in (True, False):
        options = BridgeConfig(override_transformer_config={"attention_softmax_in_fp32": value})
        check_overrides_of_model(options, provider, transformer_engine=False)
        if value:
            check_overrides_of_model(options, provider, transformer_engine=True)
            continue
        with pytest.raises(ConfigError, match=r"\['attention_softmax_in_fp32'\]=False: Transformer Engine's attention"):
            check_overrides_of_model(options, provider, transformer_engine=True)


def test_a_capacity_of_experts_is_refused_where_padding_would_take_a_part_of_it() -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.model.provider import check_overrides_of_model

    provider = SimpleNamespace(num_moe_experts=4)
    limit = {"override_transformer_config": {"moe_expert_capacity_factor": 1.0}}
    check_overrides_of_model(BridgeConfig(param_dtype="bfloat16", **limit), provider, transformer_engine=True)
    message = r"\['moe_expert_capacity_factor'\]=1\.0: sequences are padded here.*param_dtype='bfloat16' on CUDA"
    for options, transformer_engine in (
        (BridgeConfig(param_dtype="float32", **limit), True),
        (BridgeConfig(param_dtype="bfloat16", **limit), False),
    ):
        with pytest.raises(ConfigError, match=message):
            check_overrides_of_model(options, provider, transformer_engine=transformer_engine)


def test_kernels_of_transformer_engine_are_those_that_local_layers_do_without() -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.megatron.local_layers import LOCAL_LAYERS

    without = {name for name in TRANSFORMER.allowed if name in LOCAL_LAYERS} - {"tp_comm_overlap"}
    assert {*NEEDS_TRANSFORMER_ENGINE} == without | {"attention_backend"}


def test_values_that_ask_for_nothing_are_taken() -> None:
    BridgeConfig(
        override_transformer_config={"moe_router_load_balancing_type": "none", "tp_comm_overlap": False},
        override_ddp_config={"overlap_param_gather": False},
    )
    BridgeConfig(override_transformer_config={"moe_router_load_balancing_type": "sinkhorn"})
    BridgeConfig(override_transformer_config={"moe_aux_loss_coeff": 0.0})


def test_a_layout_that_does_not_fit_the_world_is_refused(tied_model: Path) -> None:
    with pytest.raises(ConfigError, match="world size 1 is not a multiple of tp"), open_bridge(tied_model, {"tp": 2}):
        pass


def test_an_override_reaches_megatron(tmp_path: Path) -> None:
    path = write_moe("qwen3_moe", tmp_path / "model")
    with open_bridge(
        path,
        override_transformer_config={"moe_z_loss_coeff": 0.5},
        override_ddp_config={"overlap_grad_reduce": True, "bucket_size": 1000},
        override_optimizer_config={"apply_wd_to_qk_layernorm": True},
        recompute_granularity="selective",
        recompute_modules=["core_attn", "mlp"],
    ) as runtime:
        handle = runtime.build_model()
        assert handle.models[0].config.moe_z_loss_coeff == 0.5
        assert handle.models[0].config.recompute_modules == ["core_attn", "mlp"]
        assert handle.chunks[0].ddp_config.bucket_size == 1000
        assert handle.trainer.megatron.config.apply_wd_to_qk_layernorm is True


def test_the_configuration_survives_a_dump() -> None:
    config = RuntimeConfig(
        backend="bridge",
        hf_path="model",
        backend_cfg=BridgeConfig(parallel=ParallelConfig(tp=2), override_ddp_config={"average_in_collective": True}),
    )
    assert RuntimeConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.shows("bridge: a missing or unsupported Megatron fails with one line saying what to install")
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


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, ""),
        # Trained is the language model, whatever the directory was saved as.
        ({"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}, ""),
        ({"model_type": "qwen3", "architectures": None}, ""),
        ({"model_type": "qwen3"}, ""),
        (
            {"model_type": "gpt_neox", "architectures": ["Qwen3ForCausalLM"]},
            "no bridge for model_type='gpt_neox' .GPTNeoXFor",
        ),
        # transformers has no language model of this type by itself: what the directory names counts.
        ({"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, ""),
        (
            {"model_type": "qwen2_5_vl", "architectures": ["SomethingElse"]},
            "no bridge for model_type='qwen2_5_vl' .Something",
        ),
        ({"model_type": "qwen2_5_vl"}, "no bridge for model_type='qwen2_5_vl'"),
        ({"model_type": "own", "architectures": ["Qwen3ForCausalLM"]}, "no configuration for model_type='own'"),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, "'kimi_k2' .Deep.* backend='native' may"),
    ],
    ids=str,
)
def test_the_language_model_of_a_type_is_what_megatron_bridge_must_know(fields: dict[str, Any], refused: str) -> None:
    if not refused:
        require_bridge("model", fields)
        return
    with pytest.raises(UnsupportedError, match=refused):
        require_bridge("model", fields)
