"""Megatron's own fields in verl's override dictionaries: honoured, of no meaning, or refused with what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.verl.options.decisions import ADAM, DDP, DECISIONS, TRANSFORMER
from adapters.verl.options.megatron import stage_layers
from adapters.verl.options.settings import EngineSettings, engine_settings
from adapters.verl.run_config import require_run
from rl_backend.contracts import ConfigError, NativeConfig, UnsupportedError
from rl_backend.model.options import DecoderOptions
from rl_backend.runtime.bridge import config as bridge_config
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.verl_configs import RoleConfigs, changed, role_configs, write_config
from tests.support.verl_fields import field_table

BACKENDS = ("native", "bridge")
TARGET = "adapters.verl.engine_config.RLBackendEngineConfig"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "dense"
    return write_config("qwen3", "Qwen3ForCausalLM", path, num_hidden_layers=24)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verl") / "moe"
    return write_config("qwen3_moe", "Qwen3MoeForCausalLM", path, num_experts=4, num_hidden_layers=24)


def settings(configs: RoleConfigs) -> EngineSettings:
    return engine_settings(*configs[:4], model_type=configs.model_type)


def given(model: Path, backend: str, dictionary: str, fields: Mapping[str, Any], **more: Any) -> EngineSettings:
    where = "optimizer" if dictionary == "override_optimizer_config" else "engine"
    values = {f"{where}__{dictionary}__{name}": value for name, value in fields.items()}
    return settings(changed(role_configs("actor", model), engine__backend=backend, **values, **more))


def options(model: Path, backend: str, dictionary: str, fields: Mapping[str, Any], **more: Any) -> Any:
    return given(model, backend, dictionary, fields, **more).runtime.backend_cfg


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dictionary", "fields"),
    [
        *(
            (where.rpartition(".")[2], {name: value})
            for where in (TRANSFORMER, DDP, ADAM)
            for name, each in DECISIONS[where].items()
            for value in each.accepts
        ),
        ("override_transformer_config", {"context_parallel_size": 1, "tensor_model_parallel_size": 1}),
        ("override_transformer_config", {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0}),
        ("override_transformer_config", {"moe_router_load_balancing_type": "none"}),
        ("override_transformer_config", {"moe_token_dispatcher_type": "alltoall", "use_flash_attn": True}),
        ("override_optimizer_config", {"optimizer_cpu_offload": False, "overlap_cpu_optimizer_d2h_h2d": True}),
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_change_nothing(
    backend: str, dictionary: str, fields: Mapping[str, Any], experts: Path
) -> None:
    assert given(experts, backend, dictionary, fields) == given(experts, backend, dictionary, {})


@pytest.mark.parametrize(
    ("dictionary", "name", "value", "native", "bridge"),
    [
        ("override_transformer_config", "fp8", "e4m3", "bfloat16 or float32 in both", "bfloat16 or float32 in both"),
        ("override_transformer_config", "cpu_offloading", True, "recompute_granularity", "recompute_granularity"),
        ("override_transformer_config", "moe_token_dispatcher_type", "flex", None, "all-to-all"),
        ("override_transformer_config", "moe_enable_deepep", True, None, "all-to-all"),
        ("override_transformer_config", "moe_input_jitter_eps", 0.1, "set backend=bridge", None),
        ("override_transformer_config", "hidden_dropout", 0.1, "set backend=bridge", None),
        ("override_transformer_config", "nonsense", 1, "neither runtime", "neither runtime"),
        ("override_transformer_config", "context_parallel_size", 2, "context_parallel_size, as 1", "as 1; remove it"),
        ("override_transformer_config", "normalization", "LayerNorm", "config.json", "config.json"),
        ("override_transformer_config", "moe_router_enable_expert_bias", True, "update_rate=0", "update_rate=0"),
        ("override_transformer_config", "moe_router_dtype", "fp64", "set backend=bridge", None),
        (
            "override_transformer_config",
            "moe_router_load_balancing_type",
            "sinkhorn",
            "has 'aux_loss'",
            None,
        ),
        ("override_transformer_config", "dsa_indexer_loss_coeff", 0.1, "sparse attention", "sparse attention"),
        ("override_ddp_config", "grad_reduce_in_fp32", False, "summed in float32", "summed in float32"),
        ("override_ddp_config", "use_megatron_fsdp", True, "decided by", "decided by"),
        ("override_ddp_config", "overlap_grad_reduce", True, "set backend=bridge", None),
        ("override_optimizer_config", "exp_avg_dtype", "bf16", "float32", "float32"),
        ("override_optimizer_config", "decoupled_weight_decay", False, "neither runtime", "neither runtime"),
    ],
)
def test_a_field_that_a_runtime_cannot_honour_is_refused_with_what_can(
    dictionary: str, name: str, value: Any, native: str | None, bridge: str | None, experts: Path
) -> None:
    for backend, message in zip(BACKENDS, (native, bridge), strict=True):
        if message is None:
            given(experts, backend, dictionary, {name: value})
            continue
        with pytest.raises(ConfigError) as raised:
            given(experts, backend, dictionary, {name: value})
        assert f"[{name!r}]={value!r}" in str(raised.value) and message in str(raised.value)
        assert ("backend=bridge" in message) == ("set backend=bridge" in str(raised.value))


def test_native_names_the_bridge_only_for_what_the_bridge_has() -> None:
    for where, allowed in ((TRANSFORMER, bridge_config.TRANSFORMER.allowed), (DDP, bridge_config.DDP.allowed)):
        for name, (_, _, bridge) in field_table(where).items():
            assert ("BridgeConfig.override" in bridge) == (name in allowed), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_of_routers_are_those_of_the_fields(backend: str, experts: Path, dense: Path) -> None:
    fields = {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    found = options(experts, backend, "override_transformer_config", fields)
    if backend == "native":
        assert isinstance(found, NativeConfig) and isinstance(found.model_cfg, DecoderOptions)
        assert (found.model, found.model_cfg.router_aux_loss_coef, found.model_cfg.router_z_loss_coef) == (
            "qwen3_moe",
            0.01,
            0.001,
        )
        with pytest.raises(ConfigError, match="this model has no experts"):
            options(dense, backend, "override_transformer_config", fields)
        contradiction = {**fields, "moe_router_load_balancing_type": "none"}
        with pytest.raises(ConfigError, match="'none' without moe_aux_loss_coeff"):
            options(experts, backend, "override_transformer_config", contradiction)
    else:
        assert isinstance(found, BridgeConfig)
        assert found.override_transformer_config == {**fields, "moe_router_load_balancing_type": "aux_loss"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_on_the_host_is_offloaded(backend: str, dense: Path) -> None:
    on_host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}
    for fields, offload in ((on_host, True), ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0}, False)):
        assert given(dense, backend, "override_optimizer_config", fields).optimizer_offload is offload
    with pytest.raises(ConfigError, match=r"optimizer_offload_fraction': 0.5.*offloaded whole"):
        given(dense, backend, "override_optimizer_config", {**on_host, "optimizer_offload_fraction": 0.5})


def of_megatron(layers: int, pp: int, vpp: int, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Megatron's own count."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        **fields,
    )
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return tuple(layout.layout[rank][chunk].count(LayerType.decoder) for chunk in range(vpp) for rank in range(pp))
    chunks = range(vpp) if vpp > 1 else (None,)
    return tuple(get_num_layers_to_build(config, vp_stage=chunk, pp_rank=rank) for chunk in chunks for rank in range(pp))


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "fields"),
    [
        (94, 16, 1, {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 5}),
        (61, 12, 1, {"num_layers_in_last_pipeline_stage": 6}),
        (14, 3, 2, {"num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 4}),
        (7, 2, 1, {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 4}),
        (94, 8, 1, {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
        (15, 2, 4, {"account_for_loss_in_pipeline_split": True}),
        (43, 8, 1, {"pipeline_model_parallel_layout": "Et*6|t*6|t*6|t*5|t*5|t*5|t*5|t*5L"}),
        (9, 2, 2, {"pipeline_model_parallel_layout": "Ettt,|(tt|)*2,ttL"}),
    ],
)
def test_stages_have_the_layers_that_megatron_gives_them(layers: int, pp: int, vpp: int, fields: Mapping[str, Any]) -> None:
    pytest.importorskip("megatron.core")
    assert stage_layers("x", fields, layers, pp, vpp) == of_megatron(layers, pp, vpp, fields)


@pytest.mark.parametrize(
    ("layers", "pp", "fields", "message"),
    [
        (8, 1, {"num_layers_in_first_pipeline_stage": 3}, "pipeline_model_parallel_size above 1"),
        (8, 3, {"num_layers_in_first_pipeline_stage": 3}, "cannot divide 8 layers"),
        (8, 3, {"account_for_loss_in_pipeline_split": True, "account_for_embedding_in_pipeline_split": True}, "8 layers"),
        (8, 2, {"pipeline_model_parallel_layout": "Etttt|tttL"}, "each of 8 layers between, in 2 stages"),
        (8, 2, {"pipeline_model_parallel_layout": "Etttt|ttttmL"}, "expected E in front"),
        (8, 2, {"num_layers_in_first_pipeline_stage": 3, "account_for_loss_in_pipeline_split": True}, "exclude each other"),
    ],
)
def test_stages_that_do_not_fit_are_refused(layers: int, pp: int, fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage_layers("x", fields, layers, pp, 1)


def test_uneven_stages_reach_the_native_runtime(dense: Path) -> None:
    fields = {"num_layers_in_first_pipeline_stage": 11, "num_layers_in_last_pipeline_stage": 5}
    sizes = {"engine__pipeline_model_parallel_size": 4}
    assert options(dense, "native", "override_transformer_config", fields, **sizes).pipeline_layers == (11, 4, 4, 5)


def test_shards_of_parameters_are_refused_on_the_bridge_and_honoured_on_native(dense: Path) -> None:
    actor = changed(role_configs("actor", dense), engine__use_megatron_fsdp=True)
    settings(actor)
    with pytest.raises(ConfigError, match=r"McoreEngineConfig\.use_megatron_fsdp=True: .*backend=native"):
        settings(changed(actor, engine__backend="bridge"))


GROUPER, MEGATRON = "use_prefix_grouper=True", "actor_rollout_ref.actor.megatron"


def test_the_prefix_grouper_of_a_role_shares_prefixes_and_is_refused_on_the_bridge(dense: Path) -> None:
    actor = role_configs("actor", dense, f"actor_rollout_ref.actor.{GROUPER}")
    found = settings(actor)
    assert isinstance(found.runtime.backend_cfg, NativeConfig) and found.runtime.backend_cfg.share_prefixes == "auto"
    assert found.use_prefix_grouper and not settings(role_configs("actor", dense)).use_prefix_grouper
    assert not settings(role_configs("ref", dense, f"actor_rollout_ref.actor.{GROUPER}")).use_prefix_grouper
    for role, line in (
        ("ref", "+actor_rollout_ref.ref"),
        ("ref", "+actor_rollout_ref.ref.megatron"),
        ("critic", "+critic.megatron"),
    ):
        assert settings(role_configs(role, dense, f"{line}.{GROUPER}")).use_prefix_grouper
    with pytest.raises(ConfigError, match="'share_prefixes' is decided by use_prefix_grouper; remove it"):
        settings(changed(actor, engine__backend_options__share_prefixes="off"))
    problem = r"use_prefix_grouper=True: backend=bridge computes every sequence by itself; set backend=native"
    with pytest.raises(ConfigError, match=problem):
        settings(changed(actor, engine__backend="bridge"))
    # Where verl reads its command line, before it starts a worker.
    with pytest.raises(Exception, match=problem):
        role_configs("actor", dense, f"actor_rollout_ref.actor.{GROUPER}", f"+{MEGATRON}.backend=bridge")


def test_first_weights_come_from_the_distributed_checkpoint(dense: Path, experts: Path) -> None:
    actor = role_configs("actor", dense)
    path = "engine__dist_checkpointing_path"
    found = settings(changed(actor, engine__use_dist_checkpointing=True, **{path: str(experts)}))
    assert found.runtime.hf_path == str(experts)
    assert settings(changed(actor, **{path: "elsewhere"})).runtime.hf_path == str(dense)


@pytest.mark.parametrize(
    ("contents", "sharded", "taken"),
    [
        (["model"], False, True),
        (["model", "hf_model"], False, True),
        (["model"], True, False),
        (["hf_model"], True, True),
        (["model", "optimizer"], False, False),
        (["optimizer", "extra"], False, False),
    ],
)
def test_contents_of_checkpoints_are_checked_with_the_configuration(
    contents: list[str], sharded: bool, taken: bool, dense: Path
) -> None:
    values = {"engine__use_dist_checkpointing": sharded, "engine__dist_checkpointing_path": str(dense)}
    configs = changed(role_configs("actor", dense), checkpoint__save_contents=contents, **values)
    if taken:
        settings(configs)
    else:
        with pytest.raises(ConfigError, match=r"checkpoint\.save_contents=.*are one training state"):
            settings(configs)


def run_configuration(*overrides: str) -> Any:
    hydra = pytest.importorskip("hydra")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=["model_engine=megatron", *overrides])


def test_top_k_distillation_is_refused_when_verl_reads_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    distillation = ["distillation.enabled=True", "distillation.distillation_loss.loss_mode=forward_kl_topk"]
    ours = f"actor_rollout_ref.actor.megatron._target_={TARGET}"
    message = r"distillation\.distillation_loss\.loss_mode='forward_kl_topk': reads a batch's logits"
    with pytest.raises(ConfigError, match=message):
        require_run(run_configuration(*distillation, ours))
    require_run(run_configuration(*distillation))
    require_run(run_configuration(distillation[0], "distillation.distillation_loss.loss_mode=k3", ours))
    require_run(run_configuration(distillation[1], ours))
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "rl_backend")
    with pytest.raises(ConfigError, match=message):
        require_run(run_configuration(*distillation))


def test_a_trainer_that_copies_the_actors_weights_is_refused_unless_it_takes_the_rollouts_log_probs() -> None:
    separate = "trainer.v1.trainer_mode=separate_async"
    ours = f"actor_rollout_ref.actor.megatron._target_={TARGET}"
    message = r"trainer\.v1\.trainer_mode='separate_async'.*set algorithm\.rollout_correction\.bypass_mode=True"
    with pytest.raises(ConfigError, match=message):
        require_run(run_configuration(separate, ours))
    require_run(run_configuration(separate, ours, "algorithm.rollout_correction.bypass_mode=True"))
    require_run(run_configuration(separate))
    for accepted in ("trainer.v1.trainer_mode=colocate_async", "trainer.use_v1=False"):
        require_run(run_configuration(separate, ours, accepted))


def test_a_worker_that_would_copy_the_actors_weights_refuses() -> None:
    from verl.experimental.separation.engine_workers import DetachActorWorker

    import adapters.verl.plugin  # noqa: F401 - what verl's entry point imports
    from adapters.verl.engine import LanguageModelEngine

    def handlers(engine: Any) -> Any:
        worker = SimpleNamespace(
            _strategy_handlers=None,
            actor=SimpleNamespace(engine=engine),
            config=SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2")),
        )
        return DetachActorWorker._get_strategy_handlers(worker)

    with pytest.raises(UnsupportedError, match=r"bypass_mode=False: .*engine_workers .* set algorithm\.rollout_correction"):
        handlers(object.__new__(LanguageModelEngine))
    assert len(handlers(None)) == 2


def test_verls_trainers_check_a_configuration_before_anything_is_started() -> None:
    import verl.trainer.main_ppo as trainer

    import adapters.verl.plugin  # noqa: F401 - what verl's entry point imports

    config = run_configuration(
        "distillation.enabled=True",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        f"actor_rollout_ref.actor.megatron._target_={TARGET}",
    )
    with pytest.raises(ConfigError, match="forward_kl_topk"):
        trainer.validate_config(config, use_reference_policy=False, use_critic=False)
