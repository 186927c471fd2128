"""Where the rows of Megatron's tensors lie in Hugging Face's, so that checkpoints are the same for every runtime."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    DirectMapping,
    GatedMLPMapping,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
)
from torch import Tensor

from rl_backend.contracts import UnsupportedError
from rl_backend.runtime.bridge.conversion import Conversion

_EXPERT = re.compile(r"experts\.\d+")
_AS_THEY_ARE = (AutoMapping, ColumnParallelMapping, DirectMapping, ReplicatedMapping, RowParallelMapping)


class StoredRows(NamedTuple):
    """Rows that lie together in both.

    Attributes:
        start, stop: in Megatron's tensor, which counts the rows of all tensor-parallel ranks.
        name, shape: the Hugging Face tensor.
        at: its first of these rows.
    """

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]
    at: int


class StoredNames:
    """Hugging Face names of what Megatron holds, for the conversions that only put rows in another order.

    Args:
        conversions: of the whole model.
        config: Megatron's ``TransformerConfig``.

    Attributes:
        private: Hugging Face names of parameters that are converted in other ways (experts stacked in one tensor, norms that
            add 1 to their weight): checkpoints hold them under Megatron's names.
    """

    def __init__(self, conversions: Sequence[Conversion], config: Any) -> None:
        self._config = config
        pairs = [(conversion, task) for conversion in conversions for task in conversion.tasks]
        self._by_tensor = {id(task.param_weight): pair for pair in pairs if (task := pair[1]).param_weight is not None}
        self._by_name = {task.global_param_name: (conversion, task) for conversion, task in pairs}
        self.private = tuple(
            name for conversion in conversions if not self._keeps_rows(conversion) for name in conversion.shapes
        )

    def rows(self, tensor: Tensor, key: str, num_rows: int, expert: int | None) -> tuple[StoredRows, ...] | None:
        """The rows of one whole tensor, or of one expert of it; None where they are kept under Megatron's name.

        Rows that no entry has only pad a vocabulary.

        Args:
            tensor: of the model.
            key: Megatron's name of the whole tensor, by which the last stage's copy of tied embeddings is found.
            num_rows: of the whole tensor.
            expert: its number in the layer.
        """
        pair = self._by_tensor.get(id(tensor)) or self._by_name.get(key)
        if pair is None or not self._keeps_rows(pair[0]):
            return None
        conversion, task = pair
        names = {part: _of_expert(name, expert) for part, name in _names(task.mapping).items()}
        shapes = {part: conversion.shapes[name] for part, name in names.items()}
        found = tuple(
            StoredRows(start, start + size, names[part], shapes[part], at)
            for part, start, size, at in self._runs(task.mapping, {part: shape[0] for part, shape in shapes.items()})
        )
        if found[-1].stop > num_rows:
            raise UnsupportedError(
                f"{key} has {num_rows} rows in Megatron, {', '.join(names.values())} have {found[-1].stop}", name=key
            )
        return found

    def _keeps_rows(self, conversion: Conversion) -> bool:
        kind, gated = type(conversion.tasks[0].mapping), bool(getattr(self._config, "attention_output_gate", False))
        if kind in _AS_THEY_ARE:
            return not getattr(conversion.tasks[0].mapping, "permute_dims", None)
        return kind is GatedMLPMapping or (kind is QKVMapping and not gated)

    def _runs(self, mapping: Any, num_rows: Mapping[str, int]) -> list[tuple[str, int, int, int]]:
        """(part, first row in Megatron's tensor, rows, first row in the part), in Megatron's order."""
        if not isinstance(mapping, QKVMapping):
            order = ("gate", "up") if isinstance(mapping, GatedMLPMapping) else ("",)
            starts = [sum(num_rows[part] for part in order[:index]) for index in range(len(order))]
            return [(part, start, num_rows[part], 0) for part, start in zip(order, starts, strict=True)]
        groups = self._config.num_query_groups or self._config.num_attention_heads
        runs, start = [], 0
        for group in range(groups):
            for part in ("q", "k", "v"):
                size = num_rows[part] // groups
                runs.append((part, start, size, group * size))
                start += size
        return runs


def _names(mapping: Any) -> dict[str, str]:
    return {"": mapping.hf_param} if isinstance(mapping.hf_param, str) else dict(mapping.hf_param)


def _of_expert(name: str, expert: int | None) -> str:
    return name if expert is None else _EXPERT.sub(f"experts.{expert}", name)
