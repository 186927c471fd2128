"""Weights: their Hugging Face names in a model, and descriptions of the tensors that are sent or written."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class PackedWeight:
    """A parameter that is several Hugging Face tensors of one shape, stacked along its first dimensions.

    The gates and up-projections of E experts in one parameter (E, 2, N, K) are
    ``PackedWeight((E, 2), (gate of 0, up of 0, gate of 1, ...))``: ``parameter[e, 0]`` is the tensor ``names[2 * e]``.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class CopiedWeight:
    """A parameter that a directory holds several times: read from the first, written to all that the directory has."""

    name: str
    copies: tuple[str, ...]


type WeightName = str | PackedWeight | CopiedWeight


def stored_tensors(name: WeightName) -> Iterator[tuple[tuple[int, ...], str]]:
    """(index into the parameter's first dimensions, Hugging Face name) of each tensor that a parameter holds."""
    if isinstance(name, str):
        yield (), name
    elif isinstance(name, CopiedWeight):
        yield from (((), stored) for stored in (name.name, *name.copies))
    else:
        yield from zip(itertools.product(*map(range, name.shape)), name.names, strict=True)


def stored_names(names: Mapping[str, WeightName]) -> list[str]:
    return [stored for name in names.values() for _, stored in stored_tensors(name)]


UNVERSIONED = -1
"""Version of an engine that serves weights no trainer has pushed."""

type Box = tuple[tuple[int, int], ...]
"""A rectangle of a tensor: the first element and the one after the last, along each dimension."""


class WeightShard(NamedTuple):
    """A rank's share of one weight: a rectangle, from ``offset`` of the whole, of no elements on ranks that have none."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor

    def __str__(self) -> str:
        return rectangle_text(self.name, box_at(self.offset, self.tensor.shape))


def box_at(start: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((first, first + size) for first, size in zip(start, shape, strict=True))


def rectangle_text(name: str, box: Box) -> str:
    return f"{name}[{', '.join(f'{first}:{end}' for first, end in box)}]"


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """Raises :class:`~rl_backend.contracts.UnsupportedError` for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is not a torch dtype; expected a name such as 'float32' or 'bfloat16'")
    return dtype


def export_dtype(dtype: torch.dtype, *, in_float32: bool) -> torch.dtype:
    """What a weight is exported in: at least float32 where it is computed with ``in_float32``."""
    return torch.promote_types(dtype, torch.float32) if in_float32 else dtype


class TensorInfo(BaseConfig):
    """One tensor under its Hugging Face name.

    Attributes:
        dtype: torch's name without the module, for example ``bfloat16``.
        offset: bytes from the start of the staging buffer; 0 where a transport has none.
        digest: of the bytes, see :func:`~rl_backend.weights.inspection.tensor_digest`; empty where each bucket has its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = Field(default=0, ge=0)
    nbytes: int = Field(ge=0)
    digest: str = ""

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype, **fields: Any) -> Self:
        nbytes = math.prod(shape) * dtype.itemsize
        return cls(name=name, shape=tuple(shape), dtype=name_of_dtype(dtype), nbytes=nbytes, **fields)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Bytes from ``offset`` to the end of the tensor."""
        return self.nbytes

    @property
    def by_rows(self) -> bool:
        """Whether its digest is that of runs of rows, see :func:`~rl_backend.weights.inspection.tensor_digest`."""
        return False

    def __str__(self) -> str:
        return self.name


class TensorPart(TensorInfo):
    """A rectangle of a tensor, which one rank sends. Its text is the name and the rectangle: ``w[0:4, 2:6]``.

    Attributes:
        shape, nbytes, digest: the rectangle's; ``offset`` is that of the whole tensor.
        whole: shape of the tensor.
        start: its first element in the tensor.
        rank: global rank that sends it.
    """

    whole: tuple[int, ...]
    start: tuple[int, ...]
    rank: int = Field(ge=0)

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    @property
    def extent(self) -> int:
        return math.prod(self.whole) * dtype_from_name(self.dtype).itemsize

    @property
    def by_rows(self) -> bool:
        # Rows that are cut have gaps between them in memory.
        return self.shape[1:] != self.whole[1:]

    def __str__(self) -> str:
        return rectangle_text(self.name, box_at(self.start, self.shape))


class TensorTile(TensorInfo):
    """A rectangle of a tensor that some of an engine's workers read, with a place of its own. ``name`` is its text.

    Attributes:
        tensor: name of the tensor.
        whole: shape of the tensor.
        start: the tile's first element in the tensor.
        workers: numbers of those that read it.
    """

    tensor: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def box(self) -> Box:
        return box_at(self.start, self.shape)

    @classmethod
    def cut(cls, info: TensorInfo, box: Box, workers: tuple[int, ...]) -> Self:
        start, shape = tuple(first for first, _ in box), tuple(end - first for first, end in box)
        fields = {"tensor": info.name, "whole": info.shape, "start": start, "workers": workers}
        return cls.of(rectangle_text(info.name, box), shape, dtype_from_name(info.dtype), **fields)

    def part(self, box: Box, rank: int) -> TensorPart:
        """A rectangle of the tensor, which lies in this tile, as the tile's."""
        start = tuple(begin - first for (begin, _), first in zip(box, self.start, strict=True))
        shape, fields = [end - begin for begin, end in box], {"whole": self.shape, "start": start, "rank": rank}
        return TensorPart.of(self.name, shape, dtype_from_name(self.dtype), offset=self.offset, **fields)


class WeightManifest(BaseConfig):
    """All tensors of one push, in the order in which they are sent.

    Attributes:
        tiles: what engines of several workers are sent of ``tensors``, which then have no places themselves.
        parts: rectangles that together are ``tiles``, or else ``tensors``, once, each with its digest; empty where one rank
            sends these whole.
        kept: names of weights that the trainer does not train, of which engines have those that they began with.
    """

    version: int = Field(ge=0)
    tensors: tuple[TensorInfo, ...]
    tiles: tuple[TensorTile, ...] = ()
    parts: tuple[TensorPart, ...] = ()
    kept: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        # An engine would load the second over the first without a word.
        counts = Counter(tensor.name for tensor in self.tensors)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise ConfigError.of("WeightManifest.tensors", twice, "each name may be sent once")
        return self

    @property
    def placed(self) -> tuple[TensorInfo, ...]:
        """What has a place in the staging buffer: tiles, or else whole tensors."""
        return self.tiles or self.tensors

    @property
    def pieces(self) -> tuple[TensorInfo, ...]:
        """What is sent and has a digest: rectangles that ranks hold, or else what has a place."""
        return self.parts or self.placed

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)
