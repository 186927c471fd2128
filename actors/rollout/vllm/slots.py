"""Slots of vLLM: the memory that its kernels read adapters from, by the names of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.wire.factors import factor_digest
from rl_backend.weights.inspection import is_zero, same_bytes


class _Place(NamedTuple):
    """Where a factor is in a slot.

    Attributes:
        name: in peft's files.
        part: index of what is here of the factor; None where all is.
        is_copy: of what is in another place, too.
        memory, beyond: views of their shape, and of what the slot has between the adapter's rank and the largest.
    """

    name: str
    part: tuple[Any, ...] | None
    is_copy: bool
    memory: Tensor
    beyond: Tensor | None

    def of(self, factors: Mapping[str, Tensor]) -> Tensor | None:
        factor = factors.get(self.name)
        return factor if factor is None or self.part is None else factor[self.part]


class _Slot(NamedTuple):
    """A slot as adapters of one rank fill it: places, copies of one A with the first, and what is 0 under any adapter."""

    places: dict[str, list[_Place]]
    copies: Sequence[tuple[Tensor, Tensor]]
    beyond: Sequence[Tensor]

    @classmethod
    def of(cls, places: Iterable[_Place]) -> _Slot:
        by_name: dict[str, list[_Place]] = {}
        for place in places:
            by_name.setdefault(place.name, []).append(place)
        every = [place for found in by_name.values() for place in found]
        copies = [(place.memory, by_name[place.name][0].memory) for place in every if place.is_copy]
        return cls(by_name, copies, [place.beyond for place in every if place.beyond is not None])

    def absent(self, factors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name in self.places.keys() - factors.keys():
            yield from ((name, place.memory) for place in self.places[name])


class Cut(NamedTuple):
    """Of a dimension of a factor that workers share, where this one's part begins, and the size of all."""

    first: int
    whole: int


class ModuleSlots(NamedTuple):
    """What the kernels read for one Hugging Face module, or for the stacked ones of experts that share a factor.

    Attributes:
        module: its name.
        a, b: for each slice of its outputs (slots, largest rank, inputs) and (slots, outputs, largest rank), views. Every
            slice has a copy of A. Those of experts have a dimension of experts, or of 1, after that of slots.
        names: of A and B in peft's files.
        before: name of the module without which vLLM finds no place for this one; empty where there is none.
        cuts: of the inputs, and of the outputs of each slice; empty where this worker has all.
    """

    module: str
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    names: tuple[str, str]
    before: str = ""
    cuts: tuple[Cut, ...] = ()

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the whole factors of an adapter."""
        inputs, *outputs = self._cuts
        a, b = self.a[0].shape[1:-2], self.b[0].shape[1:-2]
        return (*a, rank, inputs.whole), (*b, sum(cut.whole for cut in outputs), rank)

    @property
    def _cuts(self) -> Sequence[Cut]:
        return self.cuts or [Cut(0, size) for size in (self.a[0].shape[-1], *(part.shape[-2] for part in self.b))]

    def places(self, index: int, rank: int) -> Iterator[_Place]:
        padded = rank < self.a[0].shape[-2]
        cut, *outputs = self._cuts
        for number, part in enumerate(self.a):
            memory, beyond = part[index, ..., :rank, :], part[index, ..., rank:, :] if padded else None
            columns = (..., slice(cut.first, cut.first + part.shape[-1])) if part.shape[-1] < cut.whole else None
            yield _Place(self.names[0], columns, number > 0, memory, beyond)
        start, whole = 0, sum(cut.whole for cut in outputs)
        for cut, part in zip(outputs, self.b, strict=True):
            memory, beyond = part[index, ..., :rank], part[index, ..., rank:] if padded else None
            first = start + cut.first
            rows = (..., slice(first, first + part.shape[-2]), slice(None)) if part.shape[-2] < whole else None
            yield _Place(self.names[1], rows, False, memory, beyond)
            start += cut.whole


@dataclass(frozen=True, eq=False)
class SlotTable:
    """The slots of every module of an engine.

    Attributes:
        others: layers that vLLM fuses in parts of its own: their slots stay empty.
        mixtures: layers of experts that share a factor, which compute with a slot only when they are told to.
    """

    modules: Sequence[ModuleSlots]
    others: Sequence[Any]
    mixtures: Sequence[Any] = ()
    # By slot and rank: the places are looked for once.
    _slots: dict[tuple[int, int], _Slot] = field(default_factory=dict)

    @property
    def kinds(self) -> str:
        """The names of all modules, those in layers as every layer has them."""
        return ", ".join(dict.fromkeys(re.sub(r".*\blayers\.\d+\.", "", slots.module) for slots in self.modules))

    def write(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> None:
        """Puts an adapter, by peft's names, into a slot, whatever was there before."""
        # vLLM's own way, module by module with zeros before each copy, takes several times as long.
        memory, written, slot = list[Tensor](), list[Tensor](), self._slot(index, rank)
        # From the last to the first: what :meth:`digest` reads first is in the processor's cache then.
        for name in reversed(slot.places):
            for place in reversed(slot.places[name]):
                factor = place.of(factors)
                if factor is None:
                    place.memory.zero_()
                else:
                    memory.append(place.memory)
                    written.append(factor)
        for beyond in slot.beyond:
            beyond.zero_()
        if memory:
            torch._foreach_copy_(memory, written)
        for layer in self.others:
            layer.reset_lora(index)
        for layer in self.mixtures:
            layer.adapter_enabled[index] = 1

    def digest(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> str:
        """The digest of the adapter in a slot; empty where it holds more. Of ``factors`` only names, shapes and dtypes
        are read.
        """
        if any(slots.cuts for slots in self.modules):
            return "" if self.difference(index, rank, factors) else factor_digest(factors, factors.values())
        slot = self._slot(index, rank)
        if not all(map(is_zero, slot.beyond)) or not all(is_zero(memory) for _, memory in slot.absent(factors)):
            return ""
        if not all(same_bytes(memory.cpu(), first.cpu()) for memory, first in slot.copies):
            return ""
        own = (place.memory.cpu() for name in factors for place in slot.places[name] if not place.is_copy)
        return factor_digest(factors, own)

    def difference(self, index: int, rank: int, factors: Mapping[str, Tensor]) -> str:
        """The name of a factor of which a slot holds something else; empty where it holds the adapter and nothing more."""
        slot = self._slot(index, rank)
        for name, memory in slot.absent(factors):
            if not is_zero(memory):
                return name
        for name, places in slot.places.items():
            for place in places:
                factor = place.of(factors)
                if factor is not None and not same_bytes(place.memory.cpu(), factor):
                    return name
                if place.beyond is not None and not is_zero(place.beyond):
                    return name
        return ""

    def _slot(self, index: int, rank: int) -> _Slot:
        key = index, rank
        if key not in self._slots:
            self._slots[key] = _Slot.of(place for slots in self.modules for place in slots.places(index, rank))
        return self._slots[key]
