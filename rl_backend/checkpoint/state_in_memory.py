"""Training state in memory: each rank's pieces as they are, one after the other, for ranks of any layout to read."""

import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import StateTensors, TensorPieces, TensorsReader, fill

_ALIGNED = 64


class _Place(NamedTuple):
    """Where a piece lies in what its rank has written: a rectangle of the tensor ``name``, from byte ``start``."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def write_state(tensors: StateTensors, manifest: TrainingManifest, room: Callable[[int], Tensor]) -> tuple[int, int]:
    """Copies what this rank writes of a training state. Not a collective.

    Args:
        room: gives (at least that many,) uint8 on the host.

    Returns:
        Where the table of the pieces begins, and where it ends.
    """
    placed = list(_placed(tensors))
    table = pickle.dumps(([place for place, _ in placed], manifest))
    start = placed[-1][0].end if placed else 0
    memory = room(start + len(table))
    for place, piece in placed:
        _view(memory, place).copy_(piece)
    memory[start : start + len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
    return start, start + len(table)


class StateInMemory(PathLike[str]):
    """What :func:`write_state` has written on every rank; where a path is asked for, its name.

    Args:
        tables: of each rank, the result of :func:`write_state`.
        read: ``read(rank, start, end)`` gives these bytes as uint8 on the host.
    """

    def __init__(self, name: str, tables: Sequence[tuple[int, int]], read: Callable[[int, int, int], Tensor]) -> None:
        self._name, self._read = name, read
        self._places: dict[MetadataIndex, tuple[int, _Place]] = {}
        found: dict[str, TensorStorageMetadata] = {}
        manifests: list[TrainingManifest] = []
        for rank, (start, end) in enumerate(tables):
            # Of processes of this group, not of a file.
            places, manifest = pickle.loads(read(rank, start, end).numpy().tobytes())
            manifests.append(manifest)
            for place in places:
                index = MetadataIndex(place.name, place.offsets)
                # What every rank has, each has written.
                if index not in self._places:
                    self._places[index] = (rank, place)
                    told = TensorStorageMetadata(TensorProperties(place.dtype), Size(place.whole), [])
                    chunk = ChunkStorageMetadata(Size(place.offsets), Size(place.shape))
                    found.setdefault(place.name, told).chunks.append(chunk)
        self.manifest = manifests[0]
        self.metadata = Metadata({**found}, storage_data={})

    def __fspath__(self) -> str:
        return self._name

    def piece(self, index: MetadataIndex) -> Tensor:
        rank, place = self._places[index]
        return _view(self._read(rank, place.start, place.end), place._replace(start=0))

    def reader(self) -> TensorsReader:
        return _MemoryReader(self)


type StateSource = Path | StateInMemory


class _MemoryReader(TensorsReader):
    def __init__(self, state: StateInMemory) -> None:
        FileSystemReader.__init__(self, state)
        self.metadata, self._state = state.metadata, state

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            fill(planner, item, self._state.piece(item.storage_index))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _placed(tensors: StateTensors) -> Iterator[tuple[_Place, Tensor]]:
    start = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorPieces):
            whole, pieces = tensor.whole_size, tensor.pieces if tensor.writes else {}
        else:
            whole, pieces = tensor.shape, {(0,) * tensor.dim(): tensor}
        for offsets, piece in pieces.items():
            place = _Place(name, tuple(whole), tuple(offsets), tuple(piece.shape), piece.dtype, start)
            yield place, piece.detach()
            start = -(-place.end // _ALIGNED) * _ALIGNED


def _view(memory: Tensor, place: _Place) -> Tensor:
    return memory[place.start : place.end].view(place.dtype).view(place.shape)
