"""What verl's roles ask of a Qwen3.5: of a directory of the language model alone, and of one that nests it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from adapters.verl.options.lora import TargetModules
from adapters.verl.options.megatron import ModelFacts
from adapters.verl.options.settings import EngineSettings, engine_settings
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig
from rl_backend.model.options import DecoderOptions
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.verl_configs import ROLES, RoleConfigs, changed, role_configs, write_config

LAYERS = 8
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
ENGINES = {"actor": "actor_rollout_ref.actor.megatron", "ref": "actor_rollout_ref.ref.megatron"}
ENGINES |= {"critic": "critic.megatron", "sft": "engine"}


def write(kind: str, folder: Path, *, nested: bool) -> Path:
    """``config.json`` of a mixture or of a dense model."""
    text: dict[str, Any] = {"num_hidden_layers": LAYERS, **(EXPERTS if "moe" in kind else {})}
    name = "Qwen3_5Moe" if "moe" in kind else "Qwen3_5"
    if nested:
        return write_config(kind, f"{name}ForConditionalGeneration", folder, text_config=text)
    return write_config(f"{kind}_text", f"{name}ForCausalLM", folder, **text)


@pytest.fixture(scope="module", params=["nested", "text"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl") / "mixture"
    return write("qwen3_5_moe", folder, nested=request.param == "nested")


@pytest.fixture(scope="module", params=["nested", "text"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_5", tmp_path_factory.mktemp("verl") / "dense", nested=request.param == "nested")


def settings(configs: RoleConfigs) -> EngineSettings:
    return engine_settings(*configs[:4], model_type=configs.model_type)


@pytest.mark.shows("verl: every role takes a Qwen3.5, dense or mixture, as it is released or as its language model alone")
@pytest.mark.parametrize("role", ROLES)
def test_every_role_takes_either_directory(role: str, mixture: Path, dense: Path) -> None:
    for model, etp in ((mixture, 2), (dense, 1)):
        found = settings(role_configs(role, model, f"{ENGINES[role]}.tensor_model_parallel_size=2"))
        assert found.runtime.hf_path == str(model)
        assert found.head == ("values" if role == "critic" else "log_probs")
        # Without a size of their own experts are cut as the rest of the model is.
        assert found.runtime.backend_cfg.parallel == ParallelConfig(tp=2, etp=etp)


def test_routes_are_replayed_where_there_are_experts(mixture: Path, dense: Path) -> None:
    mode = f"{ENGINES['actor']}.router_replay.mode=R3"
    assert settings(role_configs("actor", mixture, mode)).router_replay == "R3"
    with pytest.raises(ConfigError, match=r"router_replay\.mode='R3': this model has no experts"):
        settings(role_configs("actor", dense, mode))


def test_losses_of_routers_name_the_family(mixture: Path) -> None:
    fields = {"engine__override_transformer_config": {"moe_aux_loss_coeff": 0.01}}
    options = settings(changed(role_configs("actor", mixture), **fields)).runtime.options(NativeConfig)
    assert options.model == "qwen3_5_moe"
    assert isinstance(options.model_cfg, DecoderOptions) and options.model_cfg.router_aux_loss_coef == 0.01


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("num_layers", LAYERS, 4),
        ("num_moe_experts", 4, 8),
        ("attention_output_gate", True, False),
        ("experimental_attention_variant", "gated_delta_net", None),
        ("layernorm_zero_centered_gamma", True, False),
        ("linear_attention_freq", 4, 2),
        ("moe_shared_expert_gate", True, False),
        ("moe_shared_expert_intermediate_size", 48, 64),
        ("moe_router_pre_softmax", False, True),
        ("qk_layernorm", True, False),
    ],
)
def test_what_config_json_decides_may_be_repeated_and_not_changed(mixture: Path, name: str, right: Any, wrong: Any) -> None:
    actor = role_configs("actor", mixture)

    def given(value: Any) -> EngineSettings:
        return settings(changed(actor, engine__override_transformer_config={name: value}))

    assert given(right) == settings(changed(actor, engine__override_transformer_config={}))
    with pytest.raises(ConfigError, match=rf"\[{name!r}\]=.*decided by config.json"):
        given(wrong)


def test_layers_without_a_period_are_megatrons_list(tmp_path: Path) -> None:
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model = write_config("qwen3_5_text", "Qwen3_5ForCausalLM", tmp_path, num_hidden_layers=4, layer_types=types)
    hf_config = role_configs("actor", model).model.hf_config
    decided = ModelFacts(hf_config, "bfloat16").of_config
    assert decided["linear_attention_freq"] == [0, 1, 1, 0]
    assert decided["moe_shared_expert_gate"] is False and decided["moe_shared_expert_intermediate_size"] is None


MODULES = tuple(
    f"model.{place}layers.{layer}.{module}"
    for place, layer, module in (
        ("language_model.", 0, "linear_attn.in_proj_qkv"),
        ("language_model.", 0, "linear_attn.in_proj_b"),
        ("language_model.", 0, "linear_attn.out_proj"),
        ("language_model.", 3, "self_attn.q_proj"),
        ("language_model.", 3, "mlp.experts.0.up_proj"),
        ("language_model.", 3, "mlp.shared_expert.up_proj"),
        ("language_model.", 3, "mlp.shared_expert_gate"),
    )
)


def test_an_adapter_is_beside_every_layer_that_is_trained_and_no_other(tmp_path: Path) -> None:
    model = write_qwen3_5(tmp_path / "model", moe=True, released=True)
    lora = settings(role_configs("actor", model, "actor_rollout_ref.model.lora.rank=4")).lora
    assert lora is not None
    everything = dataclasses.replace(lora, targets=dataclasses.replace(lora.targets, include=()))
    found = everything.for_model(model)
    names = (*("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), *("q_proj", "k_proj", "v_proj", "o_proj"))
    assert sorted(found.targets) == sorted((*names, "gate_proj", "up_proj", "down_proj", "shared_expert_gate"))
    # verl's default names attention and feed-forward blocks alone.
    assert not {"in_proj_qkv", "out_proj"} & set(lora.for_model(model).targets)


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (TargetModules("field", "megatron", ("in_proj",)), ("in_proj_qkv", "in_proj_b")),
        (TargetModules("field", "megatron", ("*.layers.0.*.out_proj",)), ("out_proj",)),
        (TargetModules("field", "megatron", ("linear_qkv",)), ("q_proj",)),
        (TargetModules("field", "peft", ("in_proj_b", "shared_expert_gate")), ("in_proj_b", "shared_expert_gate")),
        (
            TargetModules("field", "megatron"),
            ("in_proj_qkv", "in_proj_b", "out_proj", "q_proj", "up_proj", "shared_expert_gate"),
        ),
    ],
)
def test_targets_are_found_by_megatrons_names_and_by_pefts(targets: TargetModules, found: tuple[str, ...]) -> None:
    assert targets.of_model(MODULES) == found
