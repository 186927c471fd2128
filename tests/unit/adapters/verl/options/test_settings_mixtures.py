"""What verl's roles ask of GLM-4.5, gpt-oss, MiniMax-M2, DeepSeek-V3 and GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.verl.options.megatron import ModelFacts
from adapters.verl.options.settings import EngineSettings, engine_settings
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig
from rl_backend.model.options import DecoderOptions
from tests.support.verl_configs import ROLES, RoleConfigs, changed, role_configs, write_config

ENGINES = {"actor": "actor_rollout_ref.actor.megatron", "ref": "actor_rollout_ref.ref.megatron"}
ENGINES |= {"critic": "critic.megatron", "sft": "engine"}
LAYERS = 4
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48, "sliding_window": 20},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**LATENT, "first_k_dense_replace": 1}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {**LATENT, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    ),
}
DECIDED: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "glm4_moe": {
        "moe_layer_freq": ([0, 1, 1, 1], 1),
        "moe_router_score_function": ("sigmoid", "softmax"),
        "moe_router_num_groups": (4, None),
        "moe_router_group_topk": (2, 1),
        "moe_router_topk_scaling_factor": (2.5, None),
        "moe_shared_expert_intermediate_size": (96, 48),
        "add_qkv_bias": (True, False),
        "add_bias_linear": (False, True),
        "qk_layernorm": (True, False),
        "moe_ffn_hidden_size": (48, 96),
    },
    "gpt_oss": {
        "softmax_type": ("learnable", "vanilla"),
        "activation_func_clamp_value": (7.0, None),
        "glu_linear_offset": (1.0, 0.0),
        "window_size": ((19, 0), (20, 0)),
        "window_attn_skip_freq": (2, None),
        "add_bias_linear": (True, False),
        "moe_router_score_function": ("softmax", "sigmoid"),
        "moe_router_pre_softmax": (False, True),
        "moe_ffn_hidden_size": (48, 96),
    },
    "minimax_m2": {
        "moe_router_score_function": ("sigmoid", "softmax"),
        "moe_router_topk_scaling_factor": (None, 2.5),
        "moe_shared_expert_intermediate_size": (None, 48),
        "qk_layernorm": (True, False),
        "add_qkv_bias": (False, True),
        "moe_layer_freq": (1, [0, 1, 1, 1]),
        "moe_ffn_hidden_size": (48, 96),
    },
    "deepseek_v3": {
        "multi_latent_attention": (True, False),
        "moe_layer_freq": ([0, 1, 1, 1], 1),
        "moe_router_score_function": ("sigmoid", "softmax"),
        "moe_router_num_groups": (4, None),
        "moe_router_group_topk": (2, 1),
        "moe_router_topk_scaling_factor": (2.5, None),
        "moe_shared_expert_intermediate_size": (96, 48),
        "add_qkv_bias": (False, True),
        "add_bias_linear": (False, True),
        "qk_layernorm": (True, False),
        "moe_ffn_hidden_size": (48, 96),
    },
    "glm4_moe_lite": {
        "multi_latent_attention": (True, False),
        "moe_layer_freq": ([0, 1, 0, 1], [0, 1, 1, 1]),
        "moe_router_num_groups": (4, None),
        "num_moe_experts": (8, 4),
    },
}
"""Family -> Megatron's field -> its value by ``config.json``, and another one."""


def settings(configs: RoleConfigs) -> EngineSettings:
    return engine_settings(*configs[:4], model_type=configs.model_type)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("verl")
    return {name: write(name, folder / name) for name in FAMILIES}


def write(name: str, folder: Path, **changes: Any) -> Path:
    architecture, fields = FAMILIES[name]
    return write_config(name, architecture, folder, **{"num_hidden_layers": LAYERS, **fields, **changes})


def role(name: str, model: Path) -> RoleConfigs:
    return role_configs(name, model, f"{ENGINES[name]}.tensor_model_parallel_size=2")


@pytest.mark.shows(
    "verl: every role takes GLM-4.5, gpt-oss, MiniMax-M2 and DeepSeek-V3; the actor replays routes by R2 and R3"
)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["actor", *(pytest.param(kind, marks=pytest.mark.long) for kind in ROLES[1:])])
def test_every_role_takes_each_family(kind: str, name: str, models: dict[str, Path]) -> None:
    configs = role(kind, models[name])
    found = settings(configs)
    assert found.runtime.hf_path == str(models[name])
    assert found.head == ("values" if kind == "critic" else "log_probs")
    # Without a size of their own experts are cut as the rest of the model is.
    assert found.runtime.backend_cfg.parallel == ParallelConfig(tp=2, etp=2)
    for mode in ("R2", "R3") if kind == "actor" else ():
        assert settings(changed(configs, engine__router_replay__mode=mode)).router_replay == mode


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_routers_name_the_family(name: str, models: dict[str, Path]) -> None:
    fields = {"engine__override_transformer_config": {"moe_aux_loss_coeff": 0.01}}
    options = settings(changed(role("actor", models[name]), **fields)).runtime.options(NativeConfig)
    assert options.model == name
    assert isinstance(options.model_cfg, DecoderOptions) and options.model_cfg.router_aux_loss_coef == 0.01


@pytest.mark.shows(
    "verl: what config.json decides of GLM-4.5, gpt-oss, MiniMax-M2 and DeepSeek-V3 may be repeated, not changed"
)
@pytest.mark.parametrize(("name", "field"), [(name, field) for name in DECIDED for field in DECIDED[name]])
def test_what_config_json_decides_may_be_repeated_and_not_changed(name: str, field: str, models: dict[str, Path]) -> None:
    actor = role("actor", models[name])
    right, wrong = DECIDED[name][field]

    def given(value: Any) -> EngineSettings:
        return settings(changed(actor, engine__override_transformer_config={field: value}))

    assert given(right) == settings(changed(actor, engine__override_transformer_config={}))
    with pytest.raises(ConfigError, match=rf"\[{field!r}\]=.*decided by config.json"):
        given(wrong)


def test_windows_that_do_not_alternate_are_megatrons_list(models: dict[str, Path]) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    hf_config = changed(role("actor", models["gpt_oss"]), model__hf_config__layer_types=kinds).model.hf_config
    assert ModelFacts(hf_config, "bfloat16").of_config["window_attn_skip_freq"] == [0, 1, 1, 0]


def test_a_size_of_heads_says_nothing_of_latents(models: dict[str, Path]) -> None:
    """Keys and values have sizes of their own, and ``kv_channels`` would be read by nothing."""
    hf_config = role("actor", models["deepseek_v3"]).model.hf_config
    assert "kv_channels" not in ModelFacts(hf_config, "bfloat16").of_config
    asked = changed(role("actor", models["deepseek_v3"]), engine__override_transformer_config={"kv_channels": 8})
    with pytest.raises(ConfigError, match="kv_channels"):
        settings(asked)
