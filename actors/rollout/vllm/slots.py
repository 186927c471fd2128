"""Slots of vLLM: the memory that its kernels read adapters from, by the names of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from rl_backend.weights.digest import same_bytes


class _Place(NamedTuple):
    """Where a factor is in a slot.

    Attributes:
        name: in peft's files.
        rows: of the factor that are here; None where all are.
        memory: a view of their shape.
        beyond: a view of what the slot has between the adapter's rank and the largest; None where they are the same.
    """

    name: str
    rows: slice | None
    memory: Tensor
    beyond: Tensor | None

    def of(self, factors: Mapping[str, Tensor]) -> Tensor | None:
        """What belongs here; None where the adapter has no such module."""
        factor = factors.get(self.name)
        return factor if factor is None or self.rows is None else factor[self.rows]


class ModuleSlots(NamedTuple):
    """What the kernels read for one Hugging Face module.

    Attributes:
        module: its name.
        a, b: for each slice of its outputs (slots, largest rank, inputs) and (slots, outputs, largest rank), views. Every
            slice has a copy of A.
        names: of A and B in peft's files.
        before: name of the module without which vLLM finds no place for this one; empty where there is none.
    """

    module: str
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    names: tuple[str, str]
    before: str = ""

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.a[0].shape[2], sum(part.shape[1] for part in self.b)

    def places(self, index: int, rank: int) -> Iterator[_Place]:
        """Of the factors of an adapter of ``rank`` in slot ``index``; of A as many as there are copies."""
        padded = rank < self.a[0].shape[1]
        for part in self.a:
            yield _Place(self.names[0], None, part[index, :rank], part[index, rank:] if padded else None)
        start = 0
        for part in self.b:
            rows = slice(start, start := start + part.shape[1]) if len(self.b) > 1 else None
            yield _Place(self.names[1], rows, part[index, :, :rank], part[index, :, rank:] if padded else None)


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The slots of every module of an engine. vLLM makes their memory once, when it loads the model.

    Attributes:
        modules: those that take adapters.
        others: layers whose slots stay empty: those that vLLM fuses in parts of its own.
    """

    modules: Sequence[ModuleSlots]
    others: Sequence[Any]
    _places: dict[tuple[int, int], tuple[_Place, ...]] = field(default_factory=dict)
    """By slot and rank."""

    @property
    def kinds(self) -> str:
        """The names of all modules, those in layers as every layer has them."""
        return ", ".join(dict.fromkeys(re.sub(r".*\blayers\.\d+\.", "", slots.module) for slots in self.modules))

    def write(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> None:
        """Puts an adapter, by peft's names, into a slot, whatever was there before.

        vLLM's own way, module by module with zeros before each copy, takes several times as long. From the last place to
        the first: what was checked last, and what :meth:`difference` looks at first, is in the processor's cache.
        """
        for place in reversed(self._places_in(index, rank)):
            factor = place.of(factors)
            if factor is None:
                place.memory.zero_()
            else:
                place.memory.copy_(factor)
            if place.beyond is not None:
                place.beyond.zero_()
        for layer in self.others:
            layer.reset_lora(index)

    def difference(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> str:
        """The name of a factor of which a slot holds something else; empty where it holds the adapter and nothing more."""
        for place in self._places_in(index, rank):
            factor = place.of(factors)
            if factor is None:
                if bool(place.memory.any()):
                    return place.name
            elif not same_bytes(place.memory.cpu(), factor):
                return place.name
            if place.beyond is not None and bool(place.beyond.any()):
                return place.name
        return ""

    def _places_in(self, index: int, rank: int) -> Sequence[_Place]:
        key = index, rank
        if key not in self._places:
            self._places[key] = tuple(place for slots in self.modules for place in slots.places(index, rank))
        return self._places[key]
