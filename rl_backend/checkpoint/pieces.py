"""Rectangular pieces of a tensor: a rank's part of a flat buffer in a checkpoint that any layout can load; host copies."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets, sizes: by dimension.
        start: of its first element in the flattened tensor; its elements follow each other there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements ``start`` to ``end`` of a flattened tensor as rectangles, at most ``2 * len(shape) - 1``, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), start)
        return
    inner = shape[1:]
    row = math.prod(inner)
    index = start // row
    if start % row or end - start < row:
        stop = min(end, (index + 1) * row)
        for box in boxes(inner, start - index * row, stop - index * row):
            yield Box((index, *box.offsets), (1, *box.sizes), box.start + index * row)
    else:
        rows = (end - start) // row
        stop = start + rows * row
        yield Box((index, *[0] * len(inner)), (rows, *inner), start)
    yield from boxes(shape, stop, end)


class TensorPieces:
    """The pieces of one tensor that this rank has. ``torch.distributed.checkpoint`` takes it in place of a tensor.

    Args:
        size: of the whole tensor.
        pieces: offsets of each piece -> the piece, a view of the tensor to save or to load.
        writes: False for a copy of what another rank writes: it is only loaded.
    """

    def __init__(self, size: Sequence[int], pieces: dict[tuple[int, ...], Tensor], *, writes: bool = True) -> None:
        self.whole_size = Size(size)
        self.pieces = pieces
        self.writes = writes

    def piece(self, index: MetadataIndex) -> Tensor:
        """The piece at ``index.offset``."""
        assert index.offset is not None, "every item of pieces has an offset"
        return self.pieces[tuple(index.offset)]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.whole_size,
                ),
            )
            for offsets, piece in self.pieces.items()
            if self.writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=Size(offsets), sizes=piece.size()) for offsets, piece in self.pieces.items()]


class PiecesSavePlanner(DefaultSavePlanner):
    """Looks pieces up by their offsets."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece(index) if isinstance(found, TensorPieces) else super().lookup_object(index)


class PiecesLoadPlanner(DefaultLoadPlanner):
    """Looks pieces up by their offsets."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default planner replaces everything but tensors by None, and looks for nested dictionaries.
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.piece(index) if isinstance(found, TensorPieces) else super().lookup_tensor(index)


class HostBuffers:
    """Host memory for one model's state; pinned for tensors on a GPU, which copies at the speed of the bus.

    It stays allocated from one copy to the next: writing to fresh memory takes several times as long.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor | TensorPieces]) -> dict[str, Tensor | TensorPieces]:
        """Copies, valid until the next call. Pieces that another rank writes are left out."""
        devices = set[torch.device]()
        copies: dict[str, Tensor | TensorPieces] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorPieces):
                pieces = {
                    offsets: self._copied((name, offsets), piece, devices)
                    for offsets, piece in tensor.pieces.items()
                    if tensor.writes
                }
                copies[name] = TensorPieces(tensor.whole_size, pieces, writes=tensor.writes)
            else:
                copies[name] = self._copied((name, ()), tensor.detach(), devices)
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return copies

    def _copied(self, key: tuple[str, tuple[int, ...]], tensor: Tensor, devices: set[torch.device]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[key] = buffer
        if tensor.device.type != "cpu":
            devices.add(tensor.device)
        return buffer.copy_(tensor, non_blocking=True)
