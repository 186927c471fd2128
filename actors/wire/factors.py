"""Factors of an adapter as one run of bytes, which goes from process to process through Ray, or in shared memory."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.wire.segment import Segment, map_segment
from rl_backend.checkpoint.peft_files import read_peft_directory
from rl_backend.contracts import dtype_from_name
from rl_backend.contracts.lora import part_name
from rl_backend.weights.inspection import RunningDigest, has_non_finite


class FactorMemory:
    """Memory for the factors of one adapter after the other: ``held``, (bytes,) uint8, or as much as is needed."""

    def __init__(self, held: Tensor | None = None) -> None:
        # Kept: the system gives new memory page by page, which takes longer than to fill it.
        self._held = torch.empty(0, dtype=torch.uint8) if held is None else held
        self._is_fixed = held is not None
        self._laid_out: tuple[Mapping[str, tuple[int, ...]], torch.dtype] = {}, torch.float32
        self._flat = self._held[:0].view(torch.float32)
        self._places: Mapping[str, Tensor] = {}

    def take(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One tensor, which is not written to, and its views of ``shapes`` one after the other."""
        if self._laid_out != (shapes, dtype):
            size = sum(map(prod, shapes.values()))
            nbytes = size * dtype.itemsize
            if self._held.nbytes < nbytes:
                assert not self._is_fixed, "whoever gives memory gives enough"
                self._held = torch.empty(nbytes, dtype=torch.uint8)
            self._flat = self._held[:nbytes].view(dtype)
            self._places = _views(self._flat, shapes)
            self._laid_out = shapes, dtype
        return self._flat, self._places


class FactorMemories:
    """A process's own :class:`FactorMemory`, and those in segments."""

    def __init__(self) -> None:
        self._own = FactorMemory()
        self._mapped: dict[str, FactorMemory] = {}

    def at(self, segment: Segment | None) -> FactorMemory:
        """That of a segment, or the process's own; raises :class:`WeightSyncError` where the segment is not on this host."""
        if segment is None:
            return self._own
        # Segments stay mapped until one is asked for when the file of another is gone.
        self._mapped = {path: memory for path, memory in self._mapped.items() if os.path.exists(path)}
        if segment.path not in self._mapped:
            self._mapped[segment.path] = FactorMemory(map_segment(segment.path, segment.nbytes))
        return self._mapped[segment.path]


class SharedFactors(NamedTuple):
    """Factors in shared memory: a segment that begins with the values, and :attr:`PackedFactors.layout`."""

    segment: Segment
    layout: bytes

    def tensors(self, memories: FactorMemories) -> Mapping[str, Tensor]:
        """Views of the values, by peft's names. Not to be written to; valid until the segment is written to again."""
        shapes, dtype = _read_layout(self.layout)
        return memories.at(self.segment).take(shapes, dtype_from_name(dtype))[1]

    def packed(self, memories: FactorMemories, digest: str) -> PackedFactors:
        shapes, dtype = _read_layout(self.layout)
        flat, _ = memories.at(self.segment).take(shapes, dtype_from_name(dtype))
        return PackedFactors(shapes, dtype, flat.view(torch.uint8).numpy(), digest)


@lru_cache(maxsize=64)
def _read_layout(layout: bytes) -> tuple[Mapping[str, tuple[int, ...]], str]:
    shapes, dtype = pickle.loads(layout)
    return shapes, dtype


@dataclass(frozen=True, eq=False)
class PackedFactors:
    """Factors of one dtype, one after the other: ``values`` are (bytes,) uint8, in the order of ``shapes``."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    values: NDArray[np.uint8]
    digest: str

    @classmethod
    def of(cls, factors: Mapping[str, tuple[Tensor, float]], dtype: str) -> PackedFactors:
        """Packs float32 factors on the CPU, each multiplied by its scale."""
        shapes = {name: tuple(factor.shape) for name, (factor, _) in factors.items()}
        return cls.pack(shapes, ((name, *factor) for name, factor in factors.items()), dtype)

    @classmethod
    def read(cls, directory: Path | str, dtype: str) -> PackedFactors:
        """Packs those of a directory in peft's format, the scales multiplied into B.

        Raises:
            CheckpointError, UnsupportedError: as :func:`~rl_backend.checkpoint.peft_files.read_peft_directory`.
        """
        found: dict[str, tuple[Tensor, float]] = {}
        adapter = read_peft_directory(directory)
        for module, parts in adapter.parts.items():
            for part, tensor in parts.items():
                scale = adapter.scales[module] if part == "B" else 1.0
                found[part_name(module, adapter.kinds[module], part)] = tensor, scale
        return cls.of(found, dtype)

    @classmethod
    def pack(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        factors: Iterable[tuple[str, Tensor, float]],
        dtype: str,
        memory: FactorMemory | None = None,
    ) -> PackedFactors:
        """As :meth:`of`, one factor after the other, none of which is held after the next one is taken.

        Args:
            factors: name, float32 values on any device, and scale of each, in any order.
            memory: holds the values, until it is used again.
        """
        ordered = {name: tuple(shapes[name]) for name in sorted(shapes)}
        flat, places = (memory or FactorMemory()).take(ordered, dtype_from_name(dtype))
        missing = set(places)
        for name, factor, scale in factors:
            torch.mul(factor.cpu(), scale, out=places[name])
            missing.discard(name)
        assert not missing, "factors are as many as shapes"
        return cls(ordered, dtype, flat.view(torch.uint8).numpy(), factor_digest(places, [flat]))

    def not_finite(self) -> str:
        """The name of a factor with NaN or infinity; empty where there is none."""
        if not has_non_finite(self._flat):
            return ""
        return next(name for name, value in self.tensors().items() if has_non_finite(value))

    @property
    def layout(self) -> bytes:
        return pickle.dumps((self.shapes, self.dtype))

    def tensors(self) -> dict[str, Tensor]:
        """Views of the values, by peft's names. Not to be written to."""
        return _views(self._flat, self.shapes)

    @property
    def _flat(self) -> Tensor:
        with warnings.catch_warnings():
            # Ray's object store is read-only, which torch has no tensors for.
            warnings.simplefilter("ignore", UserWarning)
            return torch.from_numpy(self.values).view(dtype_from_name(self.dtype))


def _views(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = flat.split([prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}


def factor_digest(factors: Mapping[str, Tensor], values: Iterable[Tensor]) -> str:
    """Digest of names, shapes and dtypes, and of ``values``: those of all on the CPU, in their order, parted in any way."""
    digest = RunningDigest(repr([(name, tuple(factor.shape), factor.dtype) for name, factor in factors.items()]))
    for each in values:
        digest.add(each)
    return str(digest)
