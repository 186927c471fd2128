"""Megatron's own fields in verl's ``override_`` dictionaries, as options of either runtime."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import torch

from adapters.verl.options.decisions import (
    ADAM,
    DDP,
    DECISIONS,
    EMBEDDING,
    FIRST,
    LAST,
    LAYOUT,
    LOSS,
    STAGE_FIELDS,
    TRANSFORMER,
    same,
)
from adapters.verl.options.model_facts import DECIDED, ModelFacts
from rl_backend.contracts import ConfigError, ParallelConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.runtime.bridge import config as bridge_config

_ON_THE_BRIDGE = {TRANSFORMER: bridge_config.TRANSFORMER, DDP: bridge_config.DDP, ADAM: bridge_config.OPTIMIZER}
_AUX, _Z, _BALANCING = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
_BIAS, _BIAS_RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
_OFFLOAD, _FRACTION = "optimizer_cpu_offload", "optimizer_offload_fraction"
# verl's own fields set these, whatever Megatron's defaults are.
_SET_BY_VERL = frozenset({"lr", "min_lr", "weight_decay", "clip_grad", "use_distributed_optimizer"})
_PRECISION = "parameters are bfloat16 or float32 in both runtimes; remove it"
# Found in Megatron's configurations, and in neither runtime.
_NOWHERE = {
    **dict.fromkeys(("fp8", "fp4", "fp8_recipe"), _PRECISION),
    "cpu_offloading": "activations stay on the device; recompute them with recompute_granularity",
}

type Given = Mapping[str, Mapping[str, Any]]
"""``TRANSFORMER``, ``DDP`` and ``ADAM`` -> fields, the former without those of recomputation, the latter without Adam's."""


def native_options(given: Given, facts: ModelFacts, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of ``NativeConfig`` for what the three dictionaries ask for.

    Raises:
        ConfigError: a field that the native runtime cannot honour, with what can.
    """
    asked = {where: _asked(where, fields, parallel, facts) for where, fields in given.items()}
    transformer = asked[TRANSFORMER]
    for name in [name for name in transformer if _is_kernel(name)]:
        del transformer[name]
    options: dict[str, Any] = {}
    stages = {name: transformer.pop(name) for name in STAGE_FIELDS if name in transformer}
    if stages:
        if facts.num_layers is None:
            name, value = next(iter(stages.items()))
            raise ConfigError.of(f"{TRANSFORMER}[{name!r}]", value, "config.json has no num_hidden_layers to divide")
        options["pipeline_layers"] = stage_layers(TRANSFORMER, stages, facts.num_layers, parallel.pp, parallel.vpp)
    losses = _router_losses(transformer, facts)
    if losses:
        options |= {"model": find_model("auto", {"model_type": facts.model_type}).name, "model_cfg": losses}
    for where, fields in asked.items():
        _require_known(where, fields)
        for name, value in fields.items():
            problem = "a field of Megatron's that backend=native does not have; remove it or set backend=bridge"
            raise ConfigError.of(f"{where}[{name!r}]", value, problem)
    return options


def bridge_options(
    given: Given, facts: ModelFacts, parallel: ParallelConfig, *, transformer_engine: bool
) -> dict[str, dict[str, Any]]:
    """Fields of ``BridgeConfig``: the dictionaries without what asks for nothing.

    Args:
        transformer_engine: whether layers can be Transformer Engine's here.

    Raises:
        ConfigError: a field that neither Megatron nor this runtime can honour.
    """
    asked = {where: _asked(where, fields, parallel, facts) for where, fields in given.items()}
    transformer = asked[TRANSFORMER]
    allowed = bridge_config.TRANSFORMER.allowed
    for name in [name for name in transformer if _is_kernel(name) and name not in allowed]:
        value = transformer.pop(name)
        if name.startswith("moe_") and value not in (False, "alltoall"):
            problem = "backend=bridge sends tokens to experts by all-to-all; remove it, or set backend=native"
            raise ConfigError.of(f"{TRANSFORMER}[{name!r}]", value, problem)
    _require_types(TRANSFORMER, transformer)
    if parallel.pp == 1:
        # There are no outputs between stages to free.
        transformer.pop("deallocate_pipeline_outputs", None)
    if transformer.get(_AUX) and _BALANCING not in transformer:
        # Megatron's default, beside which the coefficient alone acts.
        transformer[_BALANCING] = "aux_loss"
    if transformer.get(_BALANCING) in ("none", "aux_loss") and not transformer.get(_AUX):
        # Without a coefficient neither adds a loss.
        transformer.pop(_BALANCING)
    if not facts.has_experts:
        for name in [name for name in transformer if name.startswith("moe_")]:
            if transformer[name] not in (False, None):
                raise _no_experts(name, transformer[name])
            del transformer[name]
    for where, fields in asked.items():
        _require_known(where, fields)
    for name in bridge_config.NEEDS_TRANSFORMER_ENGINE:
        if transformer.get(name) and not transformer_engine:
            raise ConfigError.of(
                f"{TRANSFORMER}[{name!r}]",
                transformer[name],
                "chooses a kernel of Transformer Engine, which needs CUDA and the package transformer-engine; remove it, or "
                "set backend=native, where it has no meaning",
            )
    return {where.rpartition(".")[2]: fields for where, fields in asked.items()}


def optimizer_on_host(overrides: Mapping[str, Any] | None) -> bool:
    """Whether Megatron's fields ask for an optimizer on the host.

    Raises:
        ConfigError: a part of it, or a fraction that Megatron would not read.
    """
    given = overrides or {}
    fraction = given.get(_FRACTION)
    field = f"{ADAM}[{_FRACTION!r}]"
    if not given.get(_OFFLOAD):
        if fraction:
            problem = f"read with {_OFFLOAD}=True only; set it, or megatron.optimizer_offload=True"
            raise ConfigError.of(field, fraction, problem)
        return False
    if fraction is None:
        raise ConfigError.of(
            f"{ADAM}[{_OFFLOAD!r}]",
            given[_OFFLOAD],
            f"Megatron offloads none of the state with {_FRACTION} at its default, 0; set that to 1, or "
            "megatron.optimizer_offload=True",
        )
    if fraction not in (0, 1):
        raise ConfigError.of(field, fraction, "the optimizer's state is offloaded whole; set 1, or 0 for none of it")
    return bool(fraction == 1)


@functools.cache
def megatron_defaults(where: str) -> Mapping[str, Any]:
    """Default of each field of one of Megatron's classes; dtypes, functions and members of enumerations by their names.

    Raises:
        UnsupportedError: no Megatron that the bridge runtime takes, with what to install.
    """
    from rl_backend.runtime.bridge.installed import import_megatron

    import_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind = {TRANSFORMER: TransformerConfig, DDP: DistributedDataParallelConfig, ADAM: OptimizerConfig}[where]
    return {field.name: _as_text(field) for field in dataclasses.fields(kind)}


def _as_text(field: dataclasses.Field[Any]) -> Any:
    value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, bool | int | float | str | list | tuple | None):
        return value
    return str(value) if isinstance(value, torch.dtype) else getattr(value, "name", None) or value.__name__


def _asked(where: str, given: Mapping[str, Any], parallel: ParallelConfig, facts: ModelFacts) -> dict[str, Any]:
    """The fields that ask for something, checked against what decides them."""
    asked = {}
    for name, value in given.items():
        decision = DECISIONS[where].get(name)
        field = f"{where}[{name!r}]"
        if where == TRANSFORMER and name in bridge_config.SIZES:
            size = getattr(parallel, bridge_config.SIZES[name])
            if not same(value, size) and not (size == 1 and value is None):
                raise ConfigError.of(field, value, f"the engine's {name} is {size}; set that one, and remove this")
        elif name in DECIDED:
            _require_as_decided(field, name, value, facts)
        elif where == TRANSFORMER and _is_off(name, value, given, parallel):
            continue
        elif where == ADAM and (name in (_OFFLOAD, _FRACTION) or (decision and decision.is_kernel)):
            # optimizer_on_host reads the first two.
            continue
        elif decision is None:
            if name in _SET_BY_VERL or not _is_default(where, name, value):
                asked[name] = value
        elif not any(same(value, each) for each in decision.accepts):
            if decision.reason is not None:
                raise ConfigError.of(field, value, f"{decision.reason}; remove it")
            asked[name] = value
    return asked


def _is_off(name: str, value: Any, given: Mapping[str, Any], parallel: ParallelConfig) -> bool:
    """Whether a switch has no effect beside other values."""
    if name == "sequence_parallel":
        return value is False and parallel.tp == 1
    # A bias of 0 that never moves chooses no expert.
    return name == _BIAS and bool(value) and given.get(_BIAS_RATE) == 0


def _is_default(where: str, name: str, value: Any) -> bool:
    """Whether a value asks for nothing because it is Megatron's default.

    Raises:
        ConfigError: there is no Megatron here to compare with.
    """
    try:
        defaults = megatron_defaults(where)
    except UnsupportedError as error:
        problem = f"cannot be compared with Megatron's default, which would ask for nothing; remove it. {error}"
        raise ConfigError.of(f"{where}[{name!r}]", value, problem) from error
    return name in defaults and same(value, defaults[name])


def _require_as_decided(field: str, name: str, value: Any, facts: ModelFacts) -> None:
    """Raises for a value that is not the one of ``config.json`` or of verl's ``dtype``."""
    if name not in facts.decided:
        raise ConfigError.of(field, value, "config.json decides it; remove it")
    given = value
    if name == "params_dtype":
        given = str(value) if str(value).startswith("torch.") else f"torch.{value}"
    if not same(given, facts.decided[name]):
        by = "the engine's dtype" if name in ("bf16", "fp16", "params_dtype") else "config.json"
        raise ConfigError.of(field, value, f"decided by {by}, as {facts.decided[name]!r}; remove it")


def _router_losses(asked: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """Takes what is about router losses out of ``asked``; gives fields of ``DecoderOptions``."""
    balancing = asked.pop(_BALANCING, None)
    given = {name: asked.pop(name) for name in (_AUX, _Z) if name in asked}
    field = f"{TRANSFORMER}[{_BALANCING!r}]"
    if balancing not in (None, "aux_loss", "none"):
        raise ConfigError.of(field, balancing, "backend=native has 'aux_loss' and 'none'; set one, or backend=bridge")
    if balancing == "none" and given.get(_AUX):
        raise ConfigError.of(field, balancing, f"Megatron would ignore {_AUX}={given[_AUX]} beside it; remove one")
    for name, value in given.items():
        if not facts.has_experts:
            raise _no_experts(name, value)
    names = {_AUX: "router_aux_loss_coef", _Z: "router_z_loss_coef"}
    return {names[name]: value for name, value in given.items()}


def _no_experts(name: str, value: Any) -> ConfigError:
    return ConfigError.of(f"{TRANSFORMER}[{name!r}]", value, "this model has no experts; remove it")


def _require_known(where: str, asked: Mapping[str, Any]) -> None:
    """Raises for the first field that the bridge does not have either."""
    bridge = _ON_THE_BRIDGE[where]
    for name, value in asked.items():
        if name not in bridge.allowed:
            reason = f"decided by {bridge.elsewhere[name]}; remove it" if name in bridge.elsewhere else None
            reason = _NOWHERE.get(name) or reason or "neither runtime has this field of Megatron's; remove it"
            raise ConfigError.of(f"{where}[{name!r}]", value, reason)


def _is_kernel(name: str) -> bool:
    decision = DECISIONS[TRANSFORMER].get(name)
    return decision is not None and decision.is_kernel


def stage_layers(where: str, fields: Mapping[str, Any], num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each of the ``pp * vpp`` pipeline stages in the order of the model, as Megatron counts them.

    Args:
        where: name of the dictionary, for errors.
        fields: of ``STAGE_FIELDS``, at least one, those that ask for something.

    Raises:
        ConfigError: fields that contradict each other or do not fit the layers.
    """
    _require_types(where, fields)
    if pp == 1:
        name, value = next(iter(fields.items()))
        raise ConfigError.of(f"{where}[{name!r}]", value, "needs stages; set pipeline_model_parallel_size above 1")
    if LAYOUT in fields:
        others = ", ".join(name for name in fields if name != LAYOUT)
        if others:
            raise ConfigError.of(f"{where}[{LAYOUT!r}]", fields[LAYOUT], f"decides all stages; remove {others}")
        return _layers_of_layout(where, fields[LAYOUT], num_layers, pp * vpp)
    # The embedding and the loss take a layer's place in the first and in the last stage.
    more = (EMBEDDING in fields) + (LOSS in fields)
    if more and (FIRST in fields or LAST in fields):
        raise ConfigError(f"{where}: {', '.join(fields)} exclude each other in Megatron; keep one kind")
    first, last = fields.get(FIRST), fields.get(LAST)
    between, ranks = num_layers + more - (first or 0) - (last or 0), pp - (first is not None) - (last is not None)
    if more and between % ranks:
        raise ConfigError(f"{where}: {', '.join(fields)} make {between} layers, which {ranks} ranks do not divide")
    if between < ranks or (between % ranks if ranks else between):
        raise ConfigError(
            f"{where}: {dict(fields)} leave {between} of {num_layers} layers for {ranks} pipeline ranks; they must divide"
        )
    sizes: list[Any] = [first] * (first is not None) + [between // max(ranks, 1)] * ranks + [last] * (last is not None)
    for size in sizes:
        if size % vpp:
            raise ConfigError(
                f"{where}: {dict(fields)} give a rank {size} layers, which virtual_pipeline_model_parallel_size={vpp} does "
                "not divide"
            )
    # Stage ``chunk * pp + rank`` is part ``chunk`` of ``rank``.
    stages = [size // vpp for _chunk in range(vpp) for size in sizes]
    stages[0] -= EMBEDDING in fields
    stages[-1] -= LOSS in fields
    return tuple(stages)


def _require_types(where: str, fields: Mapping[str, Any]) -> None:
    """Raises for a number of layers that is none, or a switch that is neither on nor off."""
    for name, value in fields.items():
        if name in (FIRST, LAST) and not (type(value) is int and value > 0):
            raise ConfigError.of(f"{where}[{name!r}]", value, "expected a number of layers, 1 or more, or null")
        if name in (EMBEDDING, LOSS) and not isinstance(value, bool):
            raise ConfigError.of(f"{where}[{name!r}]", value, "expected True or False")


def _layers_of_layout(where: str, layout: Any, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Of Megatron's text, such as ``Et*3|(tt|)*2tL``: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between stages."""
    text = str(layout).strip("'\"").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = tuple(stage.count("t") for stage in text.split("|"))
    problem = None
    if re.fullmatch(r"Et*(\|t*)*L", text) is None:
        problem = "expected E in front, L at the end, and t for each layer between, in stages of |"
    elif len(stages) != num_stages or sum(stages) != num_layers:
        problem = f"has {len(stages)} stages with {sum(stages)} layers; expected {num_stages} stages with {num_layers}"
    if problem is not None:
        raise ConfigError.of(f"{where}[{LAYOUT!r}]", layout, problem)
    return stages
