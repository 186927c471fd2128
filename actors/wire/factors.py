"""Factors of an adapter as one run of bytes, which Ray hands from process to process without pickling tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rl_backend.contracts import dtype_from_name
from rl_backend.weights.digest import tensor_digest
from rl_backend.weights.finite import has_non_finite, inspect_tensor


class FactorMemory:
    """Memory for the factors of one adapter after the other.

    The system gives new memory page by page, which takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)
        self._laid_out: tuple[Mapping[str, tuple[int, ...]], torch.dtype] = {}, torch.float32
        self._flat = self._held.view(torch.float32)
        self._places: Mapping[str, Tensor] = {}

    def take(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, Mapping[str, Tensor]]:
        """One tensor, with any values, and its views of ``shapes`` one after the other: in the memory of every call."""
        if self._laid_out != (shapes, dtype):
            size = sum(map(prod, shapes.values()))
            nbytes = size * dtype.itemsize
            if self._held.nbytes < nbytes:
                self._held = torch.empty(nbytes, dtype=torch.uint8)
            self._flat = self._held[:nbytes].view(dtype)
            self._places = _views(self._flat, shapes)
            self._laid_out = shapes, dtype
        return self._flat, self._places


@dataclass(frozen=True, eq=False)
class PackedFactors:
    """Factors of one dtype, one after the other.

    Attributes:
        shapes: by peft's names, in the order of ``values``.
        dtype: of all.
        values: (bytes,) uint8.
        digest: of names, shapes and values, where they come from.
    """

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
    def pack(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        factors: Iterable[tuple[str, Tensor, float]],
        dtype: str,
        memory: FactorMemory | None = None,
    ) -> PackedFactors:
        """As :meth:`of`, one factor after the other, none of which is held after the next one is taken.

        Args:
            shapes: of all factors.
            factors: name, float32 values on any device, and scale of each, in any order.
            memory: holds the values, until it is used again.
        """
        ordered = {name: tuple(shapes[name]) for name in sorted(shapes)}
        flat, places = (memory or FactorMemory()).take(ordered, dtype_from_name(dtype))
        packed = 0
        for packed, (name, factor, scale) in enumerate(factors, 1):
            torch.mul(factor.cpu(), scale, out=places[name])
        assert packed == len(places), "factors are as many as shapes"
        return cls(ordered, dtype, flat.view(torch.uint8).numpy(), _digest(ordered, tensor_digest(flat)))

    def damage(self, digest: str) -> str:
        """Why this is not what was sent, which had ``digest``, or must not be loaded; empty where nothing is wrong."""
        found = inspect_tensor(self._flat)
        if _digest(self.shapes, found.digest) != digest:
            return "it was damaged on its way"
        if found.finite:
            return ""
        name = next(name for name, value in self.tensors().items() if has_non_finite(value))
        return f"{name} has values that are not finite"

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


def _digest(shapes: Mapping[str, Any], values: str) -> str:
    return f"{xxhash.xxh3_64_hexdigest(repr(dict(shapes)).encode())} {values}"
