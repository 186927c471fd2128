"""Places of the parts of a sharded tensor, on this rank and every other, without communication."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rl_backend.contracts import UnsupportedError

type Region = tuple[slice, ...]
"""A rectangle of a tensor: one slice for each of its dimensions."""

MOST_SPLIT_DIMENSIONS = 8
"""Dimensions along which :func:`covers_once` takes a tensor to be split; its work doubles with each."""


@dataclass(frozen=True)
class ShardLayout:
    """Which rank has which rectangle of one tensor.

    Attributes:
        mesh_shape: of the mesh, empty for a tensor that is whole; ``ranks`` are global ones, its last dimension fastest.
        cuts: (mesh dimension, tensor dimension) in the order in which the tensor is cut. Each divides what those before it
            left as ``torch.chunk`` does. Along the other mesh dimensions ranks have copies.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]

    def region(self, rank: int) -> Region:
        """The rectangle that global rank ``rank`` has."""
        region, coordinate = [slice(0, size) for size in self.shape], self._coordinates[rank]
        for mesh_dim, dim in self.cuts:
            region[dim] = chunk(region[dim], self.mesh_shape[mesh_dim], coordinate[mesh_dim])
        return tuple(region)

    def counts(self, rank: int) -> bool:
        """Whether ``rank`` stands for all ranks that have the same rectangle."""
        cut, coordinate = {mesh_dim for mesh_dim, _ in self.cuts}, self._coordinates[rank]
        return not any(place for mesh_dim, place in enumerate(coordinate) if mesh_dim not in cut)

    def copies(self) -> dict[Region, list[int]]:
        """Rectangles that together are the whole tensor once, none of them empty -> the global ranks that have each."""
        found: dict[Region, list[int]] = {}
        for rank in self.ranks:
            region = self.region(rank)
            if all(part.start < part.stop for part in region):
                found.setdefault(region, []).append(rank)
        return found

    @cached_property
    def _coordinates(self) -> Mapping[int, tuple[int, ...]]:
        """Global rank -> its place in each dimension of the mesh."""
        return dict(zip(self.ranks, itertools.product(*map(range, self.mesh_shape)), strict=True))


def choose_senders(rectangles: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """The rank that sends each rectangle, given as (elements, ranks that have it), so that ranks send about equally much.

    A rank that alone has one must send it. The others are dealt out, the largest first, to the rank with the least to send.
    """
    senders, sent = [0] * len(rectangles), Counter[int]()
    order = sorted(range(len(rectangles)), key=lambda index: (len(rectangles[index][1]) > 1, -rectangles[index][0]))
    for index in order:
        elements, ranks = rectangles[index]
        senders[index] = min(ranks, key=lambda rank: (sent[rank], rank))
        sent[senders[index]] += elements
    return senders


def chunk(whole: slice, ranks: int, rank: int) -> slice:
    """The rank's part of ``whole`` when it is cut as ``torch.chunk`` cuts it: the last ranks may get less, or nothing."""
    size = math.ceil((whole.stop - whole.start) / ranks)
    first = min(whole.start + rank * size, whole.stop)
    return slice(first, min(first + size, whole.stop))


def covers_once(whole: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether every element of a tensor of the sizes ``whole`` is in exactly one of ``boxes``, each (offsets, sizes).

    Raises:
        ValueError: the boxes split more than ``MOST_SPLIT_DIMENSIONS`` dimensions.
    """
    if 0 in whole:
        return all(0 in sizes for _, sizes in boxes)
    filled = [box for box in boxes if 0 not in box[1]]
    split = [
        dimension
        for dimension, size in enumerate(whole)
        if any(offsets[dimension] != 0 or sizes[dimension] != size for offsets, sizes in filled)
    ]
    if len(split) > MOST_SPLIT_DIMENSIONS:
        raise ValueError(f"it is split along {len(split)} dimensions; {MOST_SPLIT_DIMENSIONS} at most are read")
    # Takes time in proportion to the number of boxes: how often each element is covered is a function whose differences
    # along all dimensions are zero but at the corners of boxes, where they are 1 or -1. These add up to the corners of
    # ``whole`` alone if, and only if, the function is 1 everywhere in ``whole`` and 0 outside.
    corners: Counter[tuple[int, ...]] = Counter()
    for (offsets, sizes), sign in [*((box, 1) for box in filled), (([0] * len(whole), whole), -1)]:
        for upper in itertools.product((0, 1), repeat=len(split)):
            corner = tuple(offsets[i] + side * sizes[i] for i, side in zip(split, upper, strict=True))
            corners[corner] += -sign if sum(upper) % 2 else sign
    return not any(corners.values())


def layout_of(tensor: Tensor) -> ShardLayout:
    """The layout of a DTensor that is cut or copied along each mesh dimension; a plain tensor is this rank's alone. Raises
    :class:`UnsupportedError`: another placement, as of a gradient that is not reduced yet.
    """
    if not isinstance(tensor, DTensor):
        return ShardLayout(tuple(tensor.shape), (), (_this_rank(),), ())
    mesh = tensor.device_mesh
    return ShardLayout(
        shape=tuple(tensor.shape),
        mesh_shape=tuple(mesh.shape),
        ranks=tuple(mesh.mesh.flatten().tolist()),
        cuts=_cuts(tensor.placements, mesh),
    )


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, detached, on the same storage."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_region(tensor: Tensor) -> Region:
    """The rectangle of the whole tensor that :func:`local_tensor` is."""
    return layout_of(tensor).region(_this_rank())


def owns(tensor: Tensor) -> bool:
    """Whether this rank counts its part in a sum over all ranks: one of the ranks that have the same part does."""
    return layout_of(tensor).counts(_this_rank())


def _this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _cuts(placements: Sequence[Placement], mesh: DeviceMesh) -> tuple[tuple[int, int], ...]:
    # FSDP2 cuts what tensor parallelism has left to a rank: of one dimension it is the last cut, though on the first mesh
    # dimension, which _StridedShard says.
    cuts, last = [], []
    for mesh_dim, placement in enumerate(placements):
        # A subclass of Shard in some versions of torch.
        if isinstance(placement, _StridedShard):
            last.append((mesh_dim, placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            cuts.append((mesh_dim, placement.dim))
    if not all(isinstance(placement, Replicate | Shard | _StridedShard) for placement in placements) or any(
        split_factor != math.prod(mesh.shape[other] for other, cut in cuts if cut == dim and other > mesh_dim)
        for mesh_dim, dim, split_factor in last
    ):
        raise UnsupportedError(
            f"a tensor has the placements {tuple(placements)} on {mesh}; expected Replicate, Shard and what fully_shard "
            "makes of them, so that every rank has one rectangle of it",
            placements=str(tuple(placements)),
        )
    return (*cuts, *((mesh_dim, dim) for mesh_dim, dim, _ in last))
