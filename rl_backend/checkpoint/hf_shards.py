"""Safetensors files whose tensors are written one by one, each at its place, as they come."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rl_backend.checkpoint.hf_reader import SINGLE_FILE
from rl_backend.contracts import CheckpointError, TensorInfo

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 8
_PART = 1 << 24


class _Place(NamedTuple):
    """Where a tensor goes.

    Attributes:
        start: its first byte in ``file``.
    """

    file: Path
    start: int
    info: TensorInfo


class ShardedFiles:
    """The files of a model, in a directory of their own. In memory is one tensor, or less where it can be viewed as bytes.

    Args:
        infos: what is going to be written, in the order in which files are filled; they may come in another.
        max_shard_bytes: largest size of the tensors in one file; a larger tensor gets a file of its own.

    Attributes:
        weight_map: name -> name of its file.
        total_bytes: of all tensors.

    Raises:
        CheckpointError: no tensors, one name twice, or a dtype that safetensors do not have.
    """

    def __init__(self, directory: Path, infos: Sequence[TensorInfo], max_shard_bytes: int) -> None:
        if not infos:
            raise CheckpointError("there are no tensors to write")
        shards = list(_shards(infos, max_shard_bytes))
        self.weight_map: dict[str, str] = {}
        self.total_bytes = sum(info.nbytes for info in infos)
        self._places: dict[str, _Place] = {}
        for number, shard in enumerate(shards):
            single = SINGLE_FILE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            self._lay_out(directory / single, shard)
        self._missing = dict.fromkeys(self._places)

    def write(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Writes each tensor before the next is taken.

        Raises:
            CheckpointError: one comes twice, is not as announced, or does not come.
            OSError: the disk is full.
        """
        for name, tensor in tensors:
            self._write(name, tensor)
        if self._missing:
            name = next(iter(self._missing))
            raise CheckpointError(
                f"{len(self._missing)} of {len(self._places)} tensors did not come, {name!r} for one", tensor=name
            )

    def _lay_out(self, file: Path, shard: Sequence[TensorInfo]) -> None:
        """Writes the header of a file and gives each tensor its place behind it."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        # The order of the safetensors library, in which every tensor of a mapped file begins at a multiple of its itemsize.
        # Readers compute on the mapped memory, and another place of a tensor can change the last bit of what they get.
        for info in sorted(shard, key=lambda info: (-_itemsize(info), info.name)):
            if info.name in self._places or info.name in starts:
                raise CheckpointError(f"tensor {info.name!r} came twice", tensor=info.name)
            starts[info.name] = end
            header[info.name] = {
                "dtype": _DTYPES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, end + info.nbytes],
            }
            end += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        for info in shard:
            self._places[info.name] = _Place(file, 8 + len(text) + starts[info.name], info)
            self.weight_map[info.name] = file.name

    def _write(self, name: str, tensor: Tensor) -> None:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"tensor {name!r} came and was not announced", tensor=name)
        if name not in self._missing:
            raise CheckpointError(f"tensor {name!r} came twice", tensor=name)
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (place.info.shape, place.info.dtype):
            raise CheckpointError(
                f"tensor {name!r} came as {found[1]} {found[0]}, {place.info.dtype} {place.info.shape} was announced",
                tensor=name,
            )
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with place.file.open("r+b", buffering=0) as stream:
            stream.seek(place.start)
            for part in data.split(_PART) if data.numel() else ():
                # NumPy takes a tensor's memory for itself: a parameter's could not be offloaded any more.
                _write_all(stream, memoryview(part.to("cpu", copy=True).numpy()))
        del self._missing[name]


def _shards(infos: Sequence[TensorInfo], max_shard_bytes: int) -> Iterator[list[TensorInfo]]:
    shard: list[TensorInfo] = []
    size = 0
    for info in infos:
        if info.dtype not in _DTYPES:
            raise CheckpointError(f"tensor {info.name!r} has dtype {info.dtype}, which is not written", tensor=info.name)
        if shard and size + info.nbytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(info)
        size += info.nbytes
    yield shard


def _itemsize(info: TensorInfo) -> int:
    return info.nbytes // max(info.num_elements, 1)


def _write_all(stream: FileIO, data: memoryview) -> None:
    while data:
        data = data[stream.write(data) :]
