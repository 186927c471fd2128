"""Slots of vLLM: the memory that its kernels read adapters from, by the names of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.wire.factors import factor_digest
from rl_backend.weights.inspection import same_bytes


class _Place(NamedTuple):
    """Where a factor is in a slot.

    Attributes:
        name: in peft's files.
        rows: of the factor that are here; None where all are.
        is_copy: of what is in another place, too.
        memory: a view of their shape.
        beyond: a view of what the slot has between the adapter's rank and the largest; None where they are the same.
    """

    name: str
    rows: slice | None
    is_copy: bool
    memory: Tensor
    beyond: Tensor | None

    def holds_more(self, factors: Mapping[str, Tensor]) -> bool:
        """Whether something is here where the adapter has nothing."""
        absent = self.name not in factors and bool(self.memory.any())
        return absent or (self.beyond is not None and bool(self.beyond.any()))

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
        for number, part in enumerate(self.a):
            yield _Place(self.names[0], None, number > 0, part[index, :rank], part[index, rank:] if padded else None)
        start = 0
        for part in self.b:
            rows = slice(start, start := start + part.shape[1]) if len(self.b) > 1 else None
            yield _Place(self.names[1], rows, False, part[index, :, :rank], part[index, :, rank:] if padded else None)


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The slots of every module of an engine. vLLM makes their memory once, when it loads the model.

    Attributes:
        modules: those that take adapters.
        others: layers whose slots stay empty: those that vLLM fuses in parts of its own.
    """

    modules: Sequence[ModuleSlots]
    others: Sequence[Any]
    _places: dict[tuple[int, int], Mapping[str, Sequence[_Place]]] = field(default_factory=dict)
    """Slot and rank -> name of a factor -> its places."""

    @property
    def kinds(self) -> str:
        """The names of all modules, those in layers as every layer has them."""
        return ", ".join(dict.fromkeys(re.sub(r".*\blayers\.\d+\.", "", slots.module) for slots in self.modules))

    def write(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> None:
        """Puts an adapter, by peft's names, into a slot, whatever was there before.

        vLLM's own way, module by module with zeros before each copy, takes several times as long.
        """
        memory, written = list[Tensor](), list[Tensor]()
        # From the last to the first: what :meth:`digest` reads first is in the processor's cache then.
        for place in reversed([place for places in self._places_in(index, rank).values() for place in places]):
            factor = place.of(factors)
            if factor is None:
                place.memory.zero_()
            else:
                memory.append(place.memory)
                written.append(factor)
            if place.beyond is not None:
                place.beyond.zero_()
        if memory:
            torch._foreach_copy_(memory, written)
        for layer in self.others:
            layer.reset_lora(index)

    def digest(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> str:
        """That of the adapter in a slot, as :func:`~actors.wire.factors.factor_digest`; empty where it holds more.

        Args:
            factors: what it should hold, of which only names, shapes and dtypes are read.
        """
        slot = self._places_in(index, rank)
        for first, *others in slot.values():
            if any(place.holds_more(factors) for place in (first, *others)):
                return ""
            if any(place.is_copy and not same_bytes(place.memory.cpu(), first.memory.cpu()) for place in others):
                return ""
        return factor_digest(factors, (place.memory.cpu() for name in factors for place in slot[name] if not place.is_copy))

    def difference(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> str:
        """The name of a factor of which a slot holds something else; empty where it holds the adapter and nothing more."""
        for name, places in self._places_in(index, rank).items():
            for place in places:
                factor = place.of(factors)
                if place.holds_more(factors) or (factor is not None and not same_bytes(place.memory.cpu(), factor)):
                    return name
        return ""

    def _places_in(self, index: int, rank: int) -> Mapping[str, Sequence[_Place]]:
        key = index, rank
        if key not in self._places:
            found: dict[str, list[_Place]] = {}
            for place in (place for slots in self.modules for place in slots.places(index, rank)):
                found.setdefault(place.name, []).append(place)
            self._places[key] = found
        return self._places[key]
