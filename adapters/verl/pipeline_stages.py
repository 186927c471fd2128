"""Layers of each pipeline stage, from Megatron's fields for uneven ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_backend.contracts import ConfigError

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
LAYOUT = "pipeline_model_parallel_layout"
STAGE_SWITCHES = (EMBEDDING, LOSS)
STAGE_FIELDS = (FIRST, LAST, *STAGE_SWITCHES, LAYOUT)


def stage_layers(where: str, fields: Mapping[str, Any], num_layers: int, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Layers of each of the ``pp * vpp`` stages in the order of the model, as Megatron counts them; None without fields.

    Args:
        where: name of the dictionary, for errors.
        fields: of ``STAGE_FIELDS``, those that ask for something.

    Raises:
        ConfigError: fields that contradict each other or do not fit the layers.
    """
    if not fields:
        return None
    require_types(where, fields)
    if pp == 1:
        name, value = next(iter(fields.items()))
        raise ConfigError.of(f"{where}[{name!r}]", value, "needs stages; set pipeline_model_parallel_size above 1")
    if LAYOUT in fields:
        if len(fields) > 1:
            raise ConfigError.of(f"{where}[{LAYOUT!r}]", fields[LAYOUT], f"decides all stages; remove {_others(fields)}")
        return _of_layout(where, fields[LAYOUT], num_layers, pp * vpp)
    if (EMBEDDING in fields or LOSS in fields) and (FIRST in fields or LAST in fields):
        raise ConfigError(f"{where}: {', '.join(fields)} exclude each other in Megatron; keep one kind")
    sizes = _accounted(where, fields, num_layers, pp) if EMBEDDING in fields or LOSS in fields else None
    return _interleaved(where, fields, sizes or _uneven(where, fields, num_layers, pp), vpp)


def require_types(where: str, fields: Mapping[str, Any]) -> None:
    """Raises :class:`ConfigError` for a number of layers that is none, or a switch that is neither on nor off."""
    for name, value in fields.items():
        if name in (FIRST, LAST) and not (type(value) is int and value > 0):
            raise ConfigError.of(f"{where}[{name!r}]", value, "expected a number of layers, 1 or more, or null")
        if name in STAGE_SWITCHES and not isinstance(value, bool):
            raise ConfigError.of(f"{where}[{name!r}]", value, "expected True or False")


def _uneven(where: str, fields: Mapping[str, Any], num_layers: int, pp: int) -> list[int]:
    first, last = fields.get(FIRST), fields.get(LAST)
    between = num_layers - (first or 0) - (last or 0)
    ranks = pp - (first is not None) - (last is not None)
    if between < ranks or (between % ranks if ranks else between):
        raise ConfigError(
            f"{where}: {dict(fields)} leave {between} of {num_layers} layers for {ranks} pipeline ranks; they must divide"
        )
    even = [between // ranks] * ranks if ranks else []
    return [*([] if first is None else [first]), *even, *([] if last is None else [last])]


def _accounted(where: str, fields: Mapping[str, Any], num_layers: int, pp: int) -> list[int]:
    more = len(fields)
    if (num_layers + more) % pp:
        raise ConfigError(f"{where}: {', '.join(fields)} make {num_layers + more} layers, which {pp} ranks do not divide")
    return [(num_layers + more) // pp] * pp


def _interleaved(where: str, fields: Mapping[str, Any], sizes: list[int], vpp: int) -> tuple[int, ...]:
    """Each rank's layers in ``vpp`` parts; stage ``chunk * pp + rank`` is part ``chunk`` of ``rank``."""
    for size in sizes:
        if size % vpp:
            raise ConfigError(
                f"{where}: {dict(fields)} give a rank {size} layers, which virtual_pipeline_model_parallel_size={vpp} does "
                "not divide"
            )
    stages = [size // vpp for _chunk in range(vpp) for size in sizes]
    # The embedding and the loss take a layer's place in the first and in the last stage.
    stages[0] -= EMBEDDING in fields
    stages[-1] -= LOSS in fields
    return tuple(stages)


def _of_layout(where: str, layout: Any, num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Of Megatron's text, such as ``Et*3|(tt|)*2tL``: ``E`` embedding, ``t`` layer, ``L`` loss, ``|`` between stages."""
    field = f"{where}[{LAYOUT!r}]"
    text = str(layout).strip("'\"").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    if re.fullmatch(r"Et*(\|t*)*L", text) is None:
        raise ConfigError.of(
            field, layout, "expected E in front, L at the end, and t for each layer between, in stages of |"
        )
    stages = tuple(stage.count("t") for stage in text.split("|"))
    if len(stages) != num_stages or sum(stages) != num_layers:
        raise ConfigError.of(
            field,
            layout,
            f"has {len(stages)} stages with {sum(stages)} layers; expected {num_stages} stages with {num_layers}",
        )
    return stages


def _others(fields: Mapping[str, Any]) -> str:
    return ", ".join(name for name in fields if name != LAYOUT)
