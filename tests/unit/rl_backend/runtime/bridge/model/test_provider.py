"""Settings that Megatron gets, and those that a model or device would ignore, refused by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rl_backend
from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.runtime.bridge.config import BridgeConfig, megatron_sizes
from rl_backend.runtime.bridge.model import provider as module
from rl_backend.runtime.bridge.model.provider import (
    _settings,
    check_overrides_of_model,
    fused_kernels,
    override,
    packs_sequences,
    require_deterministic_kernels,
    uses_transformer_engine,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def provider(**fields: Any) -> Any:
    settings = {"vocab_size": 100, "num_moe_experts": None, "qk_layernorm": True, "moe_router_enable_expert_bias": False}
    return SimpleNamespace(**{**settings, **fields})


def test_the_smallest_layout_has_these_settings() -> None:
    assert _settings(BridgeConfig(), provider(), CPU, "log_probs") == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "variable_seq_lengths": False,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "batch_p2p_sync": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "autocast_dtype": torch.float32,
        "bf16": False,
        "fp16": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "should_pad_vocab": False,
        "make_vocab_size_divisible_by": 1,
        "mtp_num_layers": None,
        "moe_token_dispatcher_type": "alltoall",
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "perform_initialization": False,
        "use_cpu_initialization": True,
    }


@pytest.mark.parametrize(
    ("options", "fields", "device", "head", "expected"),
    [
        ({"parallel": {"tp": 2}}, {}, CPU, "log_probs", {"sequence_parallel": True, "should_pad_vocab": False}),
        ({"parallel": {"tp": 3}}, {}, CPU, "log_probs", {"should_pad_vocab": True, "tensor_model_parallel_size": 3}),
        (
            {"parallel": {"pp": 2, "vpp": 2}},
            {},
            CPU,
            "log_probs",
            {
                "variable_seq_lengths": True,
                "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
                "virtual_pipeline_model_parallel_size": 2,
                "sequence_parallel": False,
            },
        ),
        ({"parallel": {"pp": 2}}, {}, CPU, "log_probs", {"variable_seq_lengths": True, "batch_p2p_comm": True}),
        (
            {"param_dtype": "bfloat16"},
            {},
            CUDA,
            "log_probs",
            {
                "params_dtype": torch.bfloat16,
                "pipeline_dtype": torch.bfloat16,
                "autocast_dtype": torch.bfloat16,
                "bf16": True,
                "use_cpu_initialization": False,
            },
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
            {},
            CPU,
            "log_probs",
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
            {},
            CPU,
            "values",
            {"recompute_modules": ["mlp", "core_attn"], "share_embeddings_and_output_weights": False},
        ),
        (
            {},
            {"num_moe_experts": 8},
            CPU,
            "log_probs",
            {
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_router_dtype": "fp32",
                "moe_router_bias_update_rate": 0.0,
            },
        ),
    ],
)  # fmt: skip
def test_options_become_megatrons_settings(
    options: dict[str, Any], fields: dict[str, Any], device: torch.device, head: Any, expected: dict[str, Any]
) -> None:
    found = _settings(BridgeConfig(**options), provider(**fields), device, head)
    assert {name: found.get(name) for name in expected} == expected
    usual = _settings(BridgeConfig(), provider(), CPU, "log_probs")
    # Nothing else is set for these options.
    assert found.keys() - usual.keys() <= expected.keys()


def test_a_layout_has_megatrons_names() -> None:
    found = megatron_sizes(ParallelConfig(tp=2, pp=3, vpp=4, cp=5, ep=6, etp=7))
    assert list(found.values()) == [2, 3, 4, 5, 6, 7]
    assert megatron_sizes(ParallelConfig(pp=3))["virtual_pipeline_model_parallel_size"] is None


@dataclass
class Fields:
    """As Megatron's dataclasses."""

    bucket_size: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        assert self.bucket_size > 0, "a bucket has a size"
        if self.overlap and self.bucket_size > 9:
            raise ValueError("too large")


def test_a_users_field_replaces_the_runtimes_and_must_exist() -> None:
    made = override("field", Fields, {"bucket_size": 3}, {"bucket_size": 2, "overlap": True})
    assert made == Fields(3, True)
    assert override("field", Fields, {}, {"overlap": True}) == Fields(1, True)
    for overrides, told in (
        ({"bucket_size": 3, "buckets": 5}, "unexpected keyword argument 'buckets'"),
        ({"bucket_size": 0}, "a bucket has a size"),
        ({"bucket_size": 10}, "too large"),
        ({"bucket_size": "x"}, "'>'"),
    ):
        with pytest.raises(ConfigError, match=rf"^field=\{{'bucket_size': .*\}}: Megatron refuses it: .*{told}"):
            override("field", Fields, overrides, {"overlap": True})


@pytest.mark.parametrize(
    ("overrides", "engine", "fields", "refused"),
    [
        ({"apply_rope_fusion": False}, False, {}, ""),
        ({"apply_rope_fusion": True}, True, {}, ""),
        (
            {"hidden_dropout": 0.1, "bias_dropout_fusion": True},
            False,
            {},
            r"\['bias_dropout_fusion'\]=True: needs layers of",
        ),
        ({"attention_backend": "flash"}, False, {}, r"\['attention_backend'\]='flash': needs layers of Transformer Engine"),
        ({"attention_backend": "flash"}, True, {}, ""),
        ({"attention_backend": "sdpa"}, True, {}, r"\['attention_backend'\]='sdpa': expected one of 'flash'"),
        ({"masked_softmax_fusion": False}, True, {}, r"\['masked_softmax_fusion'\]=False: Transformer Engine's attention"),
        ({"moe_router_dtype": "fp64"}, True, {}, r"\['moe_router_dtype'\]='fp64': this model has no experts"),
        ({"moe_router_dtype": "fp64"}, True, {"num_moe_experts": 8}, ""),
        ({"moe_expert_capacity_factor": None}, False, {"num_moe_experts": 8}, ""),
    ],
    ids=str,
)
def test_an_override_is_refused_where_the_model_or_its_layers_would_ignore_it(
    overrides: dict[str, Any], engine: bool, fields: dict[str, Any], refused: str
) -> None:
    options = BridgeConfig(override_transformer_config=overrides)
    given = provider(masked_softmax_fusion=True, attention_softmax_in_fp32=True, **fields)
    if not refused:
        check_overrides_of_model(options, given, transformer_engine=engine)
        return
    with pytest.raises(ConfigError, match=rf"^BridgeConfig\.override_transformer_config{refused}"):
        check_overrides_of_model(options, given, transformer_engine=engine)


def test_a_rate_and_a_decay_need_what_they_act_on() -> None:
    rate = BridgeConfig(expert_bias_rate=0.5)
    check_overrides_of_model(rate, provider(moe_router_enable_expert_bias=True), transformer_engine=False)
    with pytest.raises(ConfigError, match=r"^BridgeConfig\.expert_bias_rate=0\.5: routers of this model have no bias"):
        check_overrides_of_model(rate, provider(), transformer_engine=False)
    for value, has_norms in ((False, False), (True, True)):
        decay = BridgeConfig(override_optimizer_config={"apply_wd_to_qk_layernorm": value})
        check_overrides_of_model(decay, provider(qk_layernorm=has_norms), transformer_engine=False)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, {"apply_rope_fusion": True, "bias_activation_fusion": True}),
        ({"position_embedding_type": "yarn"}, {"bias_activation_fusion": True}),
        ({"rotary_interleaved": True}, {"bias_activation_fusion": True}),
        ({"multi_latent_attention": True}, {"bias_activation_fusion": True}),
        ({"activation_func": F.gelu}, {"apply_rope_fusion": True}),
        ({"gated_linear_unit": False}, {"apply_rope_fusion": True}),
        ({"activation_func_clamp_value": 7.0}, {"apply_rope_fusion": True}),
        ({"glu_linear_offset": 1.0}, {"apply_rope_fusion": True}),
    ],
    ids=str,
)
def test_kernels_that_compute_the_same_are_asked_for(fields: dict[str, Any], fused: dict[str, bool]) -> None:
    swiglu = {"activation_func": F.silu, "gated_linear_unit": True, "glu_linear_offset": 0.0}
    rope = {"position_embedding_type": "rope", "rotary_interleaved": False, "multi_latent_attention": False}
    assert fused_kernels(provider(**{**swiglu, **rope, "activation_func_clamp_value": None, **fields})) == fused


def test_kernels_and_packing_are_those_of_the_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for installed in (True, False):
        monkeypatch.setattr(module, "has_transformer_engine", lambda installed=installed: installed)
        assert uses_transformer_engine(CUDA) is installed and not uses_transformer_engine(CPU)
    assert packs_sequences(BridgeConfig(param_dtype="bfloat16"), transformer_engine=True)
    assert not packs_sequences(BridgeConfig(param_dtype="float32"), transformer_engine=True)
    assert not packs_sequences(BridgeConfig(param_dtype="bfloat16"), transformer_engine=False)


def test_deterministic_kernels_are_asked_for_unless_the_environment_forbids_them(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=rf"\['deterministic_mode'\]=True: the environment has {name}=1, with"):
        require_deterministic_kernels()
    monkeypatch.delenv(name)
    require_deterministic_kernels()
    assert os.environ[name] == "0"
    require_deterministic_kernels()
    monkeypatch.delenv(name)


def test_no_other_file_names_what_megatron_deprecates() -> None:
    package = Path(rl_backend.__file__).parent
    named = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if re.search(r"gpt_provider|GPTModel|provide_distributed_model", file.read_text())
    }
    assert named == {"runtime/bridge/model/provider.py"}
