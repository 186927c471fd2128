"""A value that is Megatron's own default asks for nothing, whichever field it is given in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from adapters.verl.options import megatron
from adapters.verl.options.decisions import ADAM, DDP, TRANSFORMER, same
from adapters.verl.options.megatron import DECIDED, ModelFacts, megatron_defaults
from adapters.verl.options.settings import OF_ADAM, EngineSettings, engine_settings
from rl_backend.contracts import ConfigError, UnsupportedError
from tests.support.verl_configs import changed, role_configs, write_config

BACKENDS = ("native", "bridge")
DICTIONARIES = {where.rpartition(".")[2]: where for where in (TRANSFORMER, DDP, ADAM)}
OTHER_HERE: Mapping[str, Mapping[str, str]] = {
    "override_transformer_config": {
        "hidden_dropout": "native",
        "attention_dropout": "native",
        "normalization": "native bridge",
        "moe_router_bias_update_rate": "native bridge",
        "moe_token_dispatcher_type": "bridge",
    },
    "override_ddp_config": {"grad_reduce_in_fp32": "native bridge", "use_distributed_optimizer": "native bridge"},
    "override_optimizer_config": {
        "weight_decay": "native bridge",
        "clip_grad": "native bridge",
        "lr": "native bridge",
        "min_lr": "native bridge",
        "use_distributed_optimizer": "native bridge",
    },
}
"""Fields that are no switches, whose value here or in verl is another than Megatron's: its default asks for something."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("verl")
    return {
        "dense": write_config("qwen3", "Qwen3ForCausalLM", folder / "dense", num_hidden_layers=24),
        "mixture": write_config("qwen3_moe", "Qwen3MoeForCausalLM", folder / "moe", num_experts=4, num_hidden_layers=24),
    }


def given(model: Path, backend: str, dictionary: str, fields: Mapping[str, Any], **more: Any) -> EngineSettings:
    where = "optimizer" if dictionary == "override_optimizer_config" else "engine"
    values = {f"{where}__{dictionary}__{name}": value for name, value in fields.items()}
    configs = changed(role_configs("actor", model), engine__backend=backend, **values, **more)
    return engine_settings(*configs[:4], model_type=configs.model_type)


def test_what_is_no_literal_in_megatrons_classes_is_compared_by_its_name() -> None:
    transformer = megatron_defaults(TRANSFORMER)
    found = {name: transformer[name] for name in ("params_dtype", "activation_func", "attention_backend", "num_layers")}
    assert found == {
        "params_dtype": "torch.float32",
        "activation_func": "gelu",
        "attention_backend": "auto",
        "num_layers": 0,
    }
    assert megatron_defaults(DDP)["bucket_size"] is None and megatron_defaults(ADAM)["adam_beta2"] == 0.999


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_megatron_a_field_that_only_its_default_decides_is_refused_and_the_others_are_not(
    backend: str, models: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: object) -> Mapping[str, Any]:
        raise UnsupportedError("megatron-core is not installed")

    monkeypatch.setattr(megatron, "megatron_defaults", missing)
    monkeypatch.setattr(ModelFacts, "of_config", property(missing))
    for dictionary, name, value in (
        ("override_transformer_config", "distribute_saved_activations", False),
        ("override_transformer_config", "num_layers", 24),
        ("override_ddp_config", "bucket_size", None),
        ("override_optimizer_config", "decoupled_weight_decay", True),
    ):
        message = rf"\[{name!r}\]={value}: cannot be compared with Megatron's value.*remove it.*is not installed"
        with pytest.raises(ConfigError, match=message):
            given(models["dense"], backend, dictionary, {name: value})
    decided = {"bf16": True, "hidden_dropout": 0.0, "attention_backend": "flash", "sequence_parallel": False}
    untouched = given(models["dense"], backend, "override_transformer_config", {})
    assert given(models["dense"], backend, "override_transformer_config", decided) == untouched
    given(models["dense"], backend, "override_transformer_config", {}, engine__full_determinism=True)


@pytest.mark.shows(
    "verl: every field of Megatron's configurations may be set to its default, unless that changes something here"
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("dictionary", DICTIONARIES)
def test_megatrons_default_of_every_field_changes_nothing_or_is_refused_where_it_would(
    dictionary: str, kind: str, backend: str, models: Mapping[str, Path]
) -> None:
    model = models[kind]
    untouched = given(model, backend, dictionary, {})
    config = role_configs("actor", model)
    facts = ModelFacts(config.model.hf_config, config.engine.dtype)
    decided = {**facts.of_config, **facts.of_dtype}
    kernels = dict[str, Any]()
    for name, value in megatron_defaults(DICTIONARIES[dictionary]).items():
        here = OTHER_HERE[dictionary].get(name, "").split()
        changes = backend in here or (name in DECIDED and not (name in decided and same(decided[name], value)))
        if changes:
            with pytest.raises(ConfigError, match=rf"\[{name!r}\]="):
                given(model, backend, dictionary, {name: value})
        elif name not in OF_ADAM:
            found = given(model, backend, dictionary, {name: value})
            passed_on = getattr(found.runtime.backend_cfg, dictionary, {})
            if found != untouched:
                # Kernels and dropout, whose value in Megatron-Bridge's provider is another than in TransformerConfig.
                kernels[name] = value
                assert backend == "bridge" and passed_on == {name: value}
    assert all("fusion" in name or "dropout" in name or name in _OF_PROVIDERS for name in kernels)


_OF_PROVIDERS = ("deallocate_pipeline_outputs", "moe_grouped_gemm", "tp_comm_overlap")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "right", "wrong", "by"),
    [
        ("num_layers", 24, 12, "config.json"),
        ("num_moe_experts", 4, None, "config.json"),
        ("qk_layernorm", True, False, "config.json"),
        ("add_qkv_bias", False, True, "config.json"),
        ("multi_latent_attention", False, True, "config.json"),
        ("bf16", True, False, "the engine's dtype"),
        ("params_dtype", "bfloat16", "float32", "the engine's dtype"),
    ],
)
def test_what_config_json_decides_may_be_repeated_and_not_changed(
    backend: str, name: str, right: Any, wrong: Any, by: str, models: Mapping[str, Path]
) -> None:
    transformer = "override_transformer_config"
    untouched = given(models["mixture"], backend, transformer, {})
    assert given(models["mixture"], backend, transformer, {name: right}) == untouched
    with pytest.raises(ConfigError, match=rf"\[{name!r}\]=.*decided by {by}, as"):
        given(models["mixture"], backend, transformer, {name: wrong})


def test_a_family_that_is_not_known_keeps_what_config_json_decides(tmp_path: Path) -> None:
    model = write_config("mixtral", "MixtralForCausalLM", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"\['window_size'\]=None: decided by config.json; remove it"):
        given(model, "bridge", "override_transformer_config", {"window_size": None})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_switch_that_is_on_is_not_taken_for_one_that_is_off(backend: str, models: Mapping[str, Path]) -> None:
    """0 is not False, and no default hides a value that asks for something."""
    for dictionary, name, value in (
        ("override_transformer_config", "fp8", "hybrid"),
        ("override_transformer_config", "cpu_offloading", True),
        ("override_transformer_config", "distribute_saved_activations", True),
        ("override_transformer_config", "moe_input_jitter_eps", float("nan")),
        ("override_transformer_config", "multi_latent_attention", 0),
        ("override_transformer_config", "num_layers_in_first_pipeline_stage", False),
        ("override_optimizer_config", "decoupled_weight_decay", False),
    ):
        if backend == "bridge" and name == "moe_input_jitter_eps":
            continue
        with pytest.raises(ConfigError, match=rf"\[{name!r}\]="):
            given(models["mixture"], backend, dictionary, {name: value}, engine__pipeline_model_parallel_size=2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequence_parallelism_may_be_off_on_one_rank_only(backend: str, models: Mapping[str, Path]) -> None:
    off = {"sequence_parallel": False}
    given(models["dense"], backend, "override_transformer_config", off)
    tp = {"engine__tensor_model_parallel_size": 2, "engine__sequence_parallel": True}
    with pytest.raises(ConfigError, match=r"\['sequence_parallel'\]=False: on exactly when tp > 1"):
        given(models["dense"], backend, "override_transformer_config", off, **tp)


def test_a_switch_of_determinism_at_rest_does_not_take_back_the_engines(models: Mapping[str, Path]) -> None:
    fields = {"deterministic_mode": False}
    found = given(models["dense"], "bridge", "override_transformer_config", fields, engine__full_determinism=True)
    assert found.runtime.backend_cfg.override_transformer_config == {"deterministic_mode": True}
