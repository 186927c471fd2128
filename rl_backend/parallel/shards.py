"""Places of the parts of a sharded tensor, on this rank and every other, without communication."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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

    def parts(self) -> Iterator[tuple[int, Region]]:
        """(global rank, rectangle) of parts that together are the whole tensor once; none is empty."""
        regions = ((rank, self.region(rank)) for rank in self.ranks if self.counts(rank))
        return ((rank, region) for rank, region in regions if all(part.start < part.stop for part in region))

    @cached_property
    def _coordinates(self) -> Mapping[int, tuple[int, ...]]:
        """Global rank -> its place in each dimension of the mesh."""
        return dict(zip(self.ranks, itertools.product(*map(range, self.mesh_shape)), strict=True))


def chunk(whole: slice, ranks: int, rank: int) -> slice:
    """The rank's part of ``whole`` when it is cut as ``torch.chunk`` cuts it: the last ranks may get less, or nothing."""
    size = math.ceil((whole.stop - whole.start) / ranks)
    first = min(whole.start + rank * size, whole.stop)
    return slice(first, min(first + size, whole.stop))


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
