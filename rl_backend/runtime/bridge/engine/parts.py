"""Rectangles of Hugging Face's tensors that ranks of the bridge hold, for pushes in which each rank sends its own."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import TensorPart, UnsupportedError, WeightShard, dtype_from_name, export_dtype
from rl_backend.parallel.collectives import gather_objects
from rl_backend.parallel.shards import choose_senders, covers_once
from rl_backend.runtime.bridge.engine.handle import BridgeHandle
from rl_backend.runtime.bridge.engine.sharding import StoredNames, model_blocks, pieces_of
from rl_backend.runtime.export_stream import WeightStream

type Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Its first element in the tensor, and its shape."""

_SOURCE_RANK = 0


@dataclass(frozen=True)
class HeldParts:
    """Which rank sends which rectangle, the same on every rank.

    Attributes:
        senders: Hugging Face name -> rectangles that are the tensor once, each with the rank that sends it.
        gathered: names of weights that Megatron does not keep as rows of them, such as experts stacked in one tensor and
            norms that add 1: all ranks gather these, and rank 0 sends them.
    """

    senders: dict[str, dict[Rectangle, int]]
    gathered: frozenset[str]


def find_parts(handle: BridgeHandle) -> HeldParts:
    """A collective over all ranks. Of ranks that hold the same rectangle one sends it, so that all send about as much."""
    mine = [(name, rectangle) for name, found in _held(handle).items() for rectangle in found]
    holders: dict[str, dict[Rectangle, list[int]]] = {info.name: {} for info in handle.weights}
    for rank, of_rank in enumerate(gather_objects(mine, handle.groups.world_group)):
        for name, rectangle in of_rank:
            holders[name].setdefault(rectangle, []).append(rank)
    gathered = frozenset(info.name for info in handle.weights if not covers_once(info.shape, list(holders[info.name])))
    for info in handle.weights:
        if info.name in gathered:
            holders[info.name] = {((0,) * len(info.shape), info.shape): [_SOURCE_RANK]}
    flat = [(torch.Size(shape).numel(), ranks) for found in holders.values() for (_, shape), ranks in found.items()]
    chosen = iter(choose_senders(flat))
    return HeldParts({name: {each: next(chosen) for each in found} for name, found in holders.items()}, gathered)


def part_infos(handle: BridgeHandle, parts: HeldParts, dtype: torch.dtype | None) -> tuple[TensorPart, ...]:
    """What :func:`export_parts` yields on all ranks."""
    dtypes = _dtypes(handle, dtype)
    return tuple(
        TensorPart.of(info.name, shape, dtypes[info.name], whole=info.shape, start=start, rank=rank)
        for info in handle.weights
        for (start, shape), rank in parts.senders[info.name].items()
    )


def export_parts(
    handle: BridgeHandle, parts: HeldParts, dtype: torch.dtype | None, gathered: WeightStream
) -> Generator[WeightShard]:
    """The rectangles of every weight that this rank sends. ``gathered``: the collective stream of ``parts.gathered``."""
    dtypes, rank = _dtypes(handle, dtype), dist.get_rank()
    with closing(gathered), torch.no_grad():
        held = _held(handle)
        for info in handle.weights:
            if info.name in parts.gathered:
                _, whole = next(gathered)
                if rank == _SOURCE_RANK:
                    yield WeightShard(info.name, info.shape, (0,) * len(info.shape), whole)
                continue
            for rectangle, sender in parts.senders[info.name].items():
                if sender == rank:
                    tensor = held[info.name][rectangle].to(dtypes[info.name])
                    yield WeightShard(info.name, info.shape, rectangle[0], tensor)
        # To the end, where ranks agree that none has closed its stream.
        for _ in gathered:
            raise AssertionError("no more is gathered than is sent")


def _held(handle: BridgeHandle) -> dict[str, dict[Rectangle, Tensor]]:
    """Rectangles that this rank holds, by Hugging Face's names."""
    handle.finish_parameter_gathers()
    try:
        blocks = model_blocks(handle.models, StoredNames(handle.converter.conversions, handle.models[0].config))
    except UnsupportedError:
        # Blocks that do not lie together in memory: ranks gather what they are.
        return {}
    flat = {id(block.tensor): (0, block.tensor.numel(), block.tensor.detach().view(-1)) for block in blocks}
    names = {info.name for info in handle.weights}
    return {
        name: {(offsets, tuple(piece.shape)): piece for offsets, piece in found.pieces.items()}
        for name, found in pieces_of(blocks, flat).items()
        if name in names
    }


def _dtypes(handle: BridgeHandle, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    own = {info.name: dtype_from_name(info.dtype) for info in handle.weights}
    if dtype is None:
        return own
    return {name: export_dtype(dtype, in_float32=name in handle.in_float32) for name in own}
