"""Megatron's own fields in verl's ``override_`` dictionaries, as options of either runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.verl import megatron_defaults
from adapters.verl.megatron_decisions import DDP, OPTIMIZER, TRANSFORMER, MegatronField, same
from adapters.verl.model_facts import DECIDED, ModelFacts
from adapters.verl.pipeline_stages import STAGE_FIELDS, require_types, stage_layers
from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.model import find_model
from rl_backend.runtime.bridge import config as bridge_config

TRANSFORMER_FIELD = "McoreEngineConfig.override_transformer_config"
DDP_FIELD = "McoreEngineConfig.override_ddp_config"
OPTIMIZER_FIELD = "McoreOptimizerConfig.override_optimizer_config"
_AUX, _Z, _BALANCING = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
_BIAS, _BIAS_RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
_OFFLOAD, _FRACTION = "optimizer_cpu_offload", "optimizer_offload_fraction"
_DEFAULTS = {
    TRANSFORMER_FIELD: megatron_defaults.TRANSFORMER,
    DDP_FIELD: megatron_defaults.DDP,
    OPTIMIZER_FIELD: megatron_defaults.OPTIMIZER,
}
# verl's own fields set these, whatever Megatron's defaults are.
_SET_BY_VERL = frozenset({"lr", "min_lr", "weight_decay", "clip_grad", "use_distributed_optimizer"})
_PRECISION = "parameters are bfloat16 or float32 in both runtimes; remove it"
# Found in Megatron's configurations, and in neither runtime.
_NOWHERE = {
    "fp8": _PRECISION,
    "fp4": _PRECISION,
    "fp8_recipe": _PRECISION,
    "cpu_offloading": "activations stay on the device; recompute them with recompute_granularity",
}


def native_options(
    transformer: Mapping[str, Any],
    ddp: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    facts: ModelFacts,
    parallel: ParallelConfig,
) -> dict[str, Any]:
    """Fields of ``NativeConfig`` for what the three dictionaries ask for.

    Raises:
        ConfigError: a field that the native runtime cannot honour, with what can.
    """
    asked = _asked(TRANSFORMER_FIELD, transformer, TRANSFORMER, parallel, facts)
    _require_nothing(DDP_FIELD, _asked(DDP_FIELD, ddp, DDP, parallel, facts), bridge_config.DDP.allowed)
    _require_nothing(
        OPTIMIZER_FIELD, _asked(OPTIMIZER_FIELD, optimizer, OPTIMIZER, parallel, facts), bridge_config.OPTIMIZER.allowed
    )
    asked = {name: value for name, value in asked.items() if not _has(TRANSFORMER, name, "chooses_kernel")}
    options: dict[str, Any] = {}
    stages = {name: asked.pop(name) for name in STAGE_FIELDS if name in asked}
    if stages:
        layers = _require_layers(stages, facts)
        options["pipeline_layers"] = stage_layers(TRANSFORMER_FIELD, stages, layers, parallel.pp, parallel.vpp)
    losses = _router_losses(asked, facts)
    if losses:
        family = find_model("auto", {"model_type": facts.model_type})
        options |= {"model": family.name, "model_cfg": losses}
    _require_nothing(TRANSFORMER_FIELD, asked, bridge_config.TRANSFORMER.allowed)
    return options


def bridge_options(
    transformer: Mapping[str, Any],
    ddp: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    facts: ModelFacts,
    parallel: ParallelConfig,
    *,
    transformer_engine: bool = True,
) -> dict[str, Any]:
    """Fields of ``BridgeConfig``: the dictionaries without what asks for nothing.

    Args:
        transformer_engine: whether layers can be Transformer Engine's here.

    Raises:
        ConfigError: a field that neither Megatron nor this runtime can honour.
    """
    asked = _asked(TRANSFORMER_FIELD, transformer, TRANSFORMER, parallel, facts)
    allowed = bridge_config.TRANSFORMER.allowed
    for name in [name for name in asked if _has(TRANSFORMER, name, "chooses_kernel") and name not in allowed]:
        value = asked.pop(name)
        if name.startswith("moe_") and value not in (False, "alltoall"):
            raise ConfigError.of(
                f"{TRANSFORMER_FIELD}[{name!r}]",
                value,
                "backend=bridge sends tokens to experts by all-to-all; remove it, or set backend=native",
            )
    require_types(TRANSFORMER_FIELD, asked)
    if parallel.pp == 1:
        # There are no outputs between stages to free.
        asked.pop("deallocate_pipeline_outputs", None)
    if asked.get(_AUX) and _BALANCING not in asked:
        # Megatron's default, beside which the coefficient alone acts.
        asked[_BALANCING] = "aux_loss"
    if asked.get(_BALANCING) in ("none", "aux_loss") and not asked.get(_AUX):
        # Megatron's default, and its absence: neither is anything without a coefficient.
        asked.pop(_BALANCING)
    if not facts.has_experts:
        asked = _without_experts(asked)
    _require_known(TRANSFORMER_FIELD, asked, allowed)
    if not transformer_engine:
        _require_no_kernels(asked)
    ddp, optimizer = (
        _asked(DDP_FIELD, ddp, DDP, parallel, facts),
        _asked(OPTIMIZER_FIELD, optimizer, OPTIMIZER, parallel, facts),
    )
    _require_known(DDP_FIELD, ddp, bridge_config.DDP.allowed)
    _require_known(OPTIMIZER_FIELD, optimizer, bridge_config.OPTIMIZER.allowed)
    return {"override_transformer_config": asked, "override_ddp_config": ddp, "override_optimizer_config": optimizer}


def _without_experts(asked: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in asked.items():
        if name.startswith("moe_") and value not in (False, None):
            raise ConfigError.of(f"{TRANSFORMER_FIELD}[{name!r}]", value, "this model has no experts; remove it")
    return {name: value for name, value in asked.items() if not name.startswith("moe_")}


def _require_no_kernels(asked: Mapping[str, Any]) -> None:
    for name in bridge_config.NEEDS_TRANSFORMER_ENGINE:
        if asked.get(name):
            raise ConfigError.of(
                f"{TRANSFORMER_FIELD}[{name!r}]",
                asked[name],
                "chooses a kernel of Transformer Engine, which runs on CUDA with the package transformer-engine, and not "
                "here; leave it out, or set backend=native, where it has no meaning",
            )


def optimizer_on_host(overrides: Mapping[str, Any] | None) -> bool:
    """Whether Megatron's fields ask for an optimizer on the host.

    Raises:
        ConfigError: a part of it, or a fraction that Megatron would not read.
    """
    given = dict(overrides or {})
    wanted, fraction = bool(given.get(_OFFLOAD)), given.get(_FRACTION)
    field = f"{OPTIMIZER_FIELD}[{_FRACTION!r}]"
    if not wanted:
        if fraction:
            raise ConfigError.of(
                field, fraction, f"read with {_OFFLOAD}=True only; set it, or megatron.optimizer_offload=True"
            )
        return False
    if fraction is None:
        raise ConfigError.of(
            f"{OPTIMIZER_FIELD}[{_OFFLOAD!r}]",
            given[_OFFLOAD],
            f"Megatron offloads none of the state with {_FRACTION} at its default, 0; set that to 1, or "
            "megatron.optimizer_offload=True",
        )
    if fraction not in (0, 1):
        raise ConfigError.of(field, fraction, "the optimizer's state is offloaded whole; set 1, or 0 for none of it")
    return bool(fraction == 1)


def _asked(
    where: str,
    given: Mapping[str, Any],
    decisions: Mapping[str, MegatronField],
    parallel: ParallelConfig,
    facts: ModelFacts,
) -> dict[str, Any]:
    """The fields that ask for something, checked against what decides them."""
    asked = {}
    for name, value in given.items():
        decision = decisions.get(name)
        field = f"{where}[{name!r}]"
        if name in bridge_config.SIZES and where == TRANSFORMER_FIELD:
            size = getattr(parallel, bridge_config.SIZES[name])
            if not any(same(value, each) for each in (size, *([None] if size == 1 else []))):
                raise ConfigError.of(field, value, f"the engine's {name} is {size}; set that one, and remove this")
        elif name in DECIDED:
            _require_as_decided(field, name, value, facts)
        elif name == "sequence_parallel" and value is False and parallel.tp == 1:
            continue
        elif name in (_OFFLOAD, _FRACTION) or (name == _BIAS and value and given.get(_BIAS_RATE) == 0):
            # optimizer_on_host reads the first two; a bias of 0 that never moves chooses no expert.
            continue
        elif _asks_for_nothing(where, name, value, decision):
            continue
        elif decision is not None and decision.only:
            raise ConfigError.of(field, value, f"{decision.native}; remove it")
        else:
            asked[name] = value
    return asked


def _asks_for_nothing(where: str, name: str, value: Any, decision: MegatronField | None) -> bool:
    if decision is None:
        # What no table names is a switch that is off, or a part of one, where it is as in Megatron.
        defaults = _DEFAULTS[where]
        return name in defaults and name not in _SET_BY_VERL and same(value, defaults[name])
    kernel_of_adam = where == OPTIMIZER_FIELD and decision.chooses_kernel
    return kernel_of_adam or any(same(value, each) for each in decision.at_rest)


def _require_as_decided(field: str, name: str, value: Any, facts: ModelFacts) -> None:
    """Raises for a value that is not the one of ``config.json`` or of verl's ``dtype``."""
    if name == "params_dtype" and not str(value).startswith("torch."):
        value = f"torch.{value}"
    if name not in facts.decided:
        raise ConfigError.of(field, value, "config.json decides it; remove it")
    if not same(str(value) if name == "params_dtype" else value, facts.decided[name]):
        by = "the engine's dtype" if name in ("bf16", "fp16", "params_dtype") else "config.json"
        raise ConfigError.of(field, value, f"decided by {by}, as {facts.decided[name]!r}; remove it")


def _router_losses(asked: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """Takes what is about router losses out of ``asked``; gives fields of ``DecoderOptions``."""
    balancing = asked.pop(_BALANCING, None)
    given = {name: asked.pop(name) for name in (_AUX, _Z) if name in asked}
    field = f"{TRANSFORMER_FIELD}[{_BALANCING!r}]"
    if balancing not in (None, "aux_loss", "none"):
        raise ConfigError.of(field, balancing, "backend=native has 'aux_loss' and 'none'; set one, or backend=bridge")
    if balancing == "none" and given.get(_AUX):
        raise ConfigError.of(field, balancing, f"Megatron would ignore {_AUX}={given[_AUX]} beside it; remove one")
    for name, value in given.items():
        if not facts.has_experts:
            raise ConfigError.of(f"{TRANSFORMER_FIELD}[{name!r}]", value, "this model has no experts; remove it")
    names = {_AUX: "router_aux_loss_coef", _Z: "router_z_loss_coef"}
    return {names[name]: value for name, value in given.items()}


def _require_layers(stages: Mapping[str, Any], facts: ModelFacts) -> int:
    if facts.num_layers is None:
        name, value = next(iter(stages.items()))
        raise ConfigError.of(f"{TRANSFORMER_FIELD}[{name!r}]", value, "config.json has no num_hidden_layers to divide")
    return facts.num_layers


def _require_nothing(where: str, asked: Mapping[str, Any], bridge_has: Any) -> None:
    """Raises for the first field that is left, naming the bridge only where it has the field."""
    _require_known(where, asked, bridge_has)
    for name, value in asked.items():
        raise ConfigError.of(
            f"{where}[{name!r}]",
            value,
            "a field of Megatron's that backend=native does not have; remove it or set backend=bridge",
        )


def _require_known(where: str, asked: Mapping[str, Any], bridge_has: Any) -> None:
    tables = {
        TRANSFORMER_FIELD: bridge_config.TRANSFORMER,
        DDP_FIELD: bridge_config.DDP,
        OPTIMIZER_FIELD: bridge_config.OPTIMIZER,
    }
    for name, value in asked.items():
        if name in bridge_has:
            continue
        reason = _NOWHERE.get(name, "neither runtime has this field of Megatron's; remove it")
        elsewhere = tables[where].elsewhere.get(name)
        if name not in _NOWHERE and elsewhere is not None:
            reason = f"decided by {elsewhere}; remove it"
        raise ConfigError.of(f"{where}[{name!r}]", value, reason)


def _has(decisions: Mapping[str, MegatronField], name: str, flag: str) -> bool:
    return name in decisions and bool(getattr(decisions[name], flag))
