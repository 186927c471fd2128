"""What becomes of verl's configurations: each field is honoured, refused by name, or decided to mean nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.verl.options.decisions import CHECKPOINT, DECISIONS, ENGINE, MODEL, OPTIMIZER, require_supported
from adapters.verl.options.settings import EngineSettings, engine_settings, optimizer_settings
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig
from rl_backend.model.options import DecoderOptions
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.optimizer import ParameterSchedule
from tests.support.verl_configs import ROLES, RoleConfigs, changed, role_configs, write_config
from tests.support.verl_fields import field_table

CLASSES = {
    ENGINE: "McoreEngineConfig",
    f"{ENGINE}.router_replay": "EngineRouterReplayConfig",
    f"{ENGINE}.qat": "QATEngineConfig",
    OPTIMIZER: "McoreOptimizerConfig",
    MODEL: "HFModelConfig",
    f"{MODEL}.mtp": "MtpConfig",
    CHECKPOINT: "McoreCheckpointConfig",
}
"""Configuration of ``DECISIONS`` -> verl's class."""
REFUSED = [(where, field) for where in CLASSES for field in DECISIONS[where]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config("qwen3", "Qwen3ForCausalLM", tmp_path_factory.mktemp("verl") / "dense")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config("qwen3_moe", "Qwen3MoeForCausalLM", tmp_path_factory.mktemp("verl") / "moe", num_experts=4)


def settings(configs: RoleConfigs) -> EngineSettings:
    return engine_settings(*configs[:4], model_type=configs.model_type)


def verl_class(name: str) -> Any:
    import verl.workers.config.checkpoint
    import verl.workers.config.engine
    import verl.workers.config.model
    import verl.workers.config.optimizer

    modules = (
        verl.workers.config.engine,
        verl.workers.config.model,
        verl.workers.config.optimizer,
        verl.workers.config.checkpoint,
    )
    return next(getattr(module, name) for module in modules if hasattr(module, name))


@pytest.mark.shows(
    "verl: every field of verl's engine, optimizer, model and checkpoint configurations is honoured or refused"
)
@pytest.mark.parametrize("where", CLASSES)
def test_every_field_of_verls_configurations_is_decided(where: str) -> None:
    fields = {field.name for field in dataclasses.fields(verl_class(CLASSES[where]))}
    assert fields - {"_target_"} == field_table(where).keys()


@pytest.mark.parametrize(("where", "field"), REFUSED)
def test_a_refused_field_is_taken_at_verls_default_and_refused_by_name_at_another_value(where: str, field: str) -> None:
    declared = {each.name: each for each in dataclasses.fields(verl_class(CLASSES[where]))}[field]
    factory = declared.default_factory
    default = declared.default if factory is dataclasses.MISSING else factory()
    assert default in DECISIONS[where][field].accepts
    require_supported(where, SimpleNamespace(**{field: default}))
    with pytest.raises(ConfigError, match=rf"{where}\.{field}='another'.*leave it at"):
        require_supported(where, SimpleNamespace(**{field: "another"}))


@pytest.mark.parametrize("backend", ["native", "bridge"])
@pytest.mark.parametrize("role", ROLES)
def test_verls_own_yaml_is_taken_as_it_is(role: str, backend: str, dense: Path) -> None:
    found = settings(changed(role_configs(role, dense), engine__backend=backend))
    assert found.runtime.backend == backend
    assert found.head == ("values" if role == "critic" else "log_probs")
    assert found.forward_only is (role == "ref")
    assert found.runtime.backend_cfg.parallel == ParallelConfig()


def test_sizes_dtype_and_seed_reach_the_runtime(experts: Path) -> None:
    line = [
        "tensor_model_parallel_size=2",
        "pipeline_model_parallel_size=2",
        "virtual_pipeline_model_parallel_size=2",
        "expert_model_parallel_size=2",
        "seed=7",
        "dtype=float32",
        "param_offload=True",
        "router_replay.mode=R3",
    ]
    overrides = [f"actor_rollout_ref.actor.megatron.{each}" for each in line]
    ours = "+actor_rollout_ref.actor.megatron.backend_options"
    overrides += [f"{ours}.pipeline_schedule=zbv", f"{ours}.model=qwen3_moe", f"{ours}.model_cfg.router_aux_loss_coef=0.5"]
    found = settings(role_configs("actor", experts, *overrides))
    options = found.runtime.backend_cfg
    assert isinstance(options, NativeConfig)
    # verl's null for experts is the tensor-parallel size of the rest.
    assert options.parallel == ParallelConfig(tp=2, pp=2, vpp=2, ep=2, etp=2)
    assert (options.param_dtype, options.pipeline_schedule, found.runtime.seed) == ("float32", "zbv", 7)
    assert isinstance(options.model_cfg, DecoderOptions) and options.model_cfg.router_aux_loss_coef == 0.5
    assert (found.param_offload, found.optimizer_offload) == (True, False)
    assert found.router_replay == "R3"


OVERRIDES = "engine__override_transformer_config__"
LAYERS = {f"{OVERRIDES}recompute_granularity": "full", f"{OVERRIDES}recompute_method": "block"}


@pytest.mark.parametrize(
    ("values", "native", "bridge"),
    [
        ({}, "full", ("full", "uniform", 1, None)),
        ({"model__enable_gradient_checkpointing": False}, "none", (None, None, None, None)),
        ({**LAYERS, f"{OVERRIDES}recompute_num_layers": 3}, None, ("full", "block", 3, None)),
        ({f"{OVERRIDES}recompute_granularity": "selective"}, None, ("selective", None, None, ("core_attn",))),
    ],
)
def test_gradient_checkpointing_is_honoured(
    values: dict[str, Any], native: str | None, bridge: tuple[Any, ...], dense: Path
) -> None:
    actor = changed(role_configs("actor", dense), **values)
    options = settings(changed(actor, engine__backend="bridge")).runtime.backend_cfg
    assert isinstance(options, BridgeConfig)
    found = (
        options.recompute_granularity,
        options.recompute_method,
        options.recompute_num_layers,
        options.recompute_modules,
    )
    assert found == bridge
    if native is None:
        with pytest.raises(ConfigError, match=r"recompute_granularity.*set these, or backend=bridge"):
            settings(actor)
    else:
        options = settings(actor).runtime.backend_cfg
        assert isinstance(options, NativeConfig) and options.activation_checkpointing == native


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("engine__dtype", "float16", r"McoreEngineConfig\.dtype='float16': both runtimes train in bfloat16 or float32"),
        (
            "engine__backend",
            "fsdp",
            r"RLBackendEngineConfig\.backend='fsdp': the runtimes of this package",
        ),
        ("engine__virtual_pipeline_model_parallel_size", 0, r"ParallelConfig\.vpp=0: "),
        (
            "engine__backend_options__parallel",
            {"tp": 2},
            r"backend_options: 'parallel' is decided by tensor_model",
        ),
        ("engine__backend_options__nonsense", 1, r"NativeConfig\.nonsense=1: unknown field"),
        ("engine__qat__enable", True, r"McoreEngineConfig\.qat\.enable=True"),
        ("engine__router_replay__record_file", "x", r"McoreEngineConfig\.router_replay\.record_file='x'"),
        ("engine__router_replay__mode", "R2", r"router_replay\.mode='R2': this model has no experts"),
        ("engine__override_ddp_config__bucket_size", 1, r"override_ddp_config\['bucket_size'\]=1: a field of Megatron's"),
        (f"{OVERRIDES}recompute_method", "block", r"recompute_method read with recompute_granularity only"),
        ("optimizer__override_optimizer_config__lr_mult", 1, r"override_optimizer_config\['lr_mult'\]=1: neither runtime"),
        ("model__hf_config_path", "elsewhere", r"HFModelConfig\.hf_config_path='elsewhere': config\.json of path is read"),
        ("model__tiled_mlp__enabled", True, r"HFModelConfig\.tiled_mlp\.enabled=True"),
        ("model__mtp__enable", True, r"HFModelConfig\.mtp\.enable=True: multi-token prediction"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(path: str, value: Any, message: str, dense: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(changed(role_configs("actor", dense), **{path: value}))


def test_tensor_parallelism_without_sequence_parallelism_is_refused(dense: Path) -> None:
    values = {"engine__tensor_model_parallel_size": 2, "engine__sequence_parallel": False}
    with pytest.raises(ConfigError, match=r"sequence_parallel=False: always on with tensor_model_parallel_size=2"):
        settings(changed(role_configs("actor", dense), **values))


def test_fields_of_megatron_reach_the_bridge(dense: Path) -> None:
    values = {
        "engine__backend": "bridge",
        "engine__full_determinism": True,
        "engine__override_ddp_config__overlap_grad_reduce": True,
        f"{OVERRIDES}hidden_dropout": 0.1,
        "optimizer__override_optimizer_config__apply_wd_to_qk_layernorm": True,
    }
    options = settings(changed(role_configs("actor", dense), **values)).runtime.backend_cfg
    assert isinstance(options, BridgeConfig)
    assert options.override_ddp_config == {"overlap_grad_reduce": True}
    assert options.override_transformer_config == {"hidden_dropout": 0.1, "deterministic_mode": True}
    assert options.override_optimizer_config == {"apply_wd_to_qk_layernorm": True}
    reference = settings(changed(role_configs("actor", dense), **values, engine__forward_only=True)).runtime.backend_cfg
    assert isinstance(reference, BridgeConfig) and reference.override_optimizer_config == {}


@pytest.mark.parametrize(
    ("name", "taken"), [("adam", True), ("adamw", True), ("AdamW", True), ("sgd", False), ("muon", False)]
)
def test_names_of_adam_with_decoupled_decay_are_taken_and_other_optimizers_refused(
    name: str, taken: bool, dense: Path
) -> None:
    actor = role_configs("actor", dense)
    if taken:
        assert settings(changed(actor, optimizer__optimizer=name)) == settings(actor)
        return
    with pytest.raises(ConfigError, match=f"optimizer='{name}': the only optimizer is AdamW"):
        settings(changed(actor, optimizer__optimizer=name))


def test_a_trained_model_needs_megatrons_optimizer_configuration_and_a_reference_none(dense: Path) -> None:
    actor, ref = (role_configs(role, dense) for role in ("actor", "ref"))
    assert not hasattr(ref.optimizer, "lr_decay_style")
    assert settings(ref._replace(optimizer=None, checkpoint=None)).save_contents == frozenset()
    with pytest.raises(ConfigError, match=r"optimizer_config='OptimizerConfig': .*optim=megatron"):
        settings(actor._replace(optimizer=ref.optimizer))
    with pytest.raises(ConfigError, match="optimizer_config='NoneType'"):
        settings(actor._replace(optimizer=None))


def optimizer_config(**fields: Any) -> Any:
    return verl_class("McoreOptimizerConfig")(**{"lr": 1e-2, "total_training_steps": 30, **fields})


SCHEDULES: list[dict[str, Any]] = [
    {"lr_decay_style": "constant", "lr_warmup_steps": 4, "lr_warmup_init": 1e-3, "weight_decay": 0.03},
    {"lr_decay_style": "linear", "min_lr": 1e-4, "lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.2},
    {"lr_decay_style": "cosine", "lr_decay_steps": 20, "lr_warmup_steps_ratio": 0.5, "weight_decay_incr_style": "cosine"},
    {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine", "lr_wsd_decay_steps": 5, "lr_warmup_steps": None},
]


@pytest.mark.parametrize("fields", SCHEDULES, ids=lambda fields: fields["lr_decay_style"])
def test_the_schedule_is_the_one_that_verl_makes_of_the_same_fields(fields: Mapping[str, Any]) -> None:
    from verl.utils.megatron.optimizer import get_megatron_optimizer_param_scheduler

    config = optimizer_config(**fields)
    group: dict[str, Any] = {}
    theirs = get_megatron_optimizer_param_scheduler(SimpleNamespace(param_groups=[group]), config)
    ours = ParameterSchedule(optimizer_settings(config))
    for _ in range(35):
        assert (ours.learning_rate, ours.weight_decay) == pytest.approx((group["lr"], group["weight_decay"]))
        theirs.step(1)
        ours.step()


def test_what_the_style_does_not_read_is_left_to_it_as_verl_does() -> None:
    unread = {"lr_decay_style": "constant", "min_lr": 1e-4, "lr_wsd_decay_steps": 3, "lr_warmup_steps_ratio": 0.0}
    expected = optimizer_settings(optimizer_config(lr_decay_style="constant"))
    assert optimizer_settings(optimizer_config(**unread)) == expected
    assert optimizer_settings(optimizer_config(**unread, lr_decay_steps=20, lr_warmup_init=1e-3)) == expected
    warmed = optimizer_settings(optimizer_config(**{**unread, "lr_warmup_steps_ratio": 0.5}, lr_decay_steps=20))
    assert warmed.warmup_steps == 10


def test_betas_and_epsilon_reach_the_optimizer() -> None:
    found = optimizer_settings(optimizer_config(betas=[0.8, 0.95], clip_grad=0.3))
    assert (found.betas, found.eps, found.clip_grad) == ((0.8, 0.95), 1e-8, 0.3)
    found = optimizer_settings(optimizer_config(override_optimizer_config={"adam_beta2": 0.9, "adam_eps": 1e-5}))
    assert (found.betas, found.eps) == ((0.9, 0.9), 1e-5)
    assert optimizer_settings(optimizer_config(lr_decay_style="inverse_square_root")).lr_decay_style == "inverse-square-root"


@pytest.mark.parametrize(("platform", "device"), [("cpu", "cpu"), ("cuda", "cuda")])
def test_the_runtime_trains_on_what_verls_platform_is(
    dense: Path, platform: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: platform)
    backend = settings(role_configs("sft", dense)).runtime.backend_cfg
    assert isinstance(backend, NativeConfig) and backend.device == device
