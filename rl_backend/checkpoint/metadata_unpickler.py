"""The ``.metadata`` file of a checkpoint, read without running code that it names."""

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from rl_backend.checkpoint.confined import require_inside
from rl_backend.checkpoint.manifest import FileFacts, damaged
from rl_backend.contracts import CheckpointError, name_of_dtype
from rl_backend.parallel.shards import covers_once

_GLOBAL = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)")
METADATA_FILE = ".metadata"
_TORCH = Metadata.__module__
_NAMES = frozenset(
    {
        *((_TORCH, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
        *((_TORCH, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        (FileSystemReader.__module__, "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    }
)
_MOST = 2**63
_DTYPES = {name_of_dtype(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def stored_metadata(path: Path, files: Mapping[str, FileFacts]) -> Metadata:
    """Tensors of the checkpoint ``path`` and the files of their pieces, which are among ``files``, those of its manifest.

    Raises:
        CheckpointError: ``.metadata`` is damaged, asks for anything to be run, names other files, or has pieces of a tensor
            that overlap or leave out a part.
    """
    try:
        if METADATA_FILE not in files:
            raise _RefusedError(f"the manifest does not list {METADATA_FILE}")
        return _metadata(_Unpickler(path, require_inside(path, METADATA_FILE).read_bytes()).load(), files)
    except CheckpointError:
        raise
    except Exception as error:  # pickle raises errors of any type for damaged data
        problem = str(error) if isinstance(error, _RefusedError) else f"{type(error).__name__}: {error}"
        raise damaged(path, METADATA_FILE, f"its {METADATA_FILE} is refused, {problem}") from error


# torch.distributed.checkpoint writes a pickle, and a pickle names functions to call. Each name that such a file may have
# stands for a record that only keeps its arguments; their contents are checked and put into torch's own classes.
class _Record:
    __slots__ = ("arguments", "state")

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Self:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    # With it a pickle cannot set attributes, neither of a record nor of its class.
    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._kinds: dict[tuple[str, str], type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) not in _NAMES:
            raise CheckpointError.at(
                self._path, f"is refused: its {METADATA_FILE} {may_run(f'{module}.{name}')}", name=METADATA_FILE
            )
        return self._kinds.setdefault((module, name), type(name, (_Record,), {"__slots__": ()}))


class _RefusedError(Exception):
    """Says what no save would have written."""


def _metadata(record: Any, files: Mapping[str, FileFacts]) -> Metadata:
    fields = _fields(record, "Metadata")
    tensors = {
        _of(str, name): _tensor(_of(str, name), each) for name, each in _of(dict, fields.get("state_dict_metadata")).items()
    }
    stored = {_index(index): _place(each, files) for index, each in _of(dict, fields.get("storage_data")).items()}
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            if MetadataIndex(name, chunk.offsets) not in stored:
                raise _RefusedError(f"it has no place for the piece of {name} at {tuple(chunk.offsets)}")
    return Metadata(dict(tensors), storage_data=stored, storage_meta=StorageMeta())


def _tensor(name: str, record: Any) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata")
    size = _size(fields.get("size"))
    chunks = [_chunk(name, each, size) for each in _of(list, fields.get("chunks"))]
    dtype = _of(tuple, _record(fields.get("properties"), "TensorProperties").state)[0]
    # Memory of a tensor is filled from its pieces: what none of them covers would be trained on as it happens to be.
    covered = covers_once(size, [(chunk.offsets, chunk.sizes) for chunk in chunks])
    if not covered:
        raise _RefusedError(f"the pieces of {name} overlap, or leave out a part of {tuple(size)}")
    return TensorStorageMetadata(TensorProperties(_of(torch.dtype, dtype)), size, chunks)


def _chunk(name: str, record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(whole) or any(
        offset + size > end for offset, size, end in zip(offsets, sizes, whole, strict=True)
    ):
        raise _RefusedError(f"{name} has a piece of {tuple(sizes)} at {tuple(offsets)}, outside of {tuple(whole)}")
    return ChunkStorageMetadata(offsets, sizes)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _of(str, fields.get("fqn")),
        None if offset is None else _size(offset),
        None if number is None else _count(number),
    )


def _place(record: Any, files: Mapping[str, FileFacts]) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    file, start, length = _of(str, fields.get("relative_path")), _count(fields.get("offset")), _count(fields.get("length"))
    problem = None
    if file not in files or file == METADATA_FILE:
        problem = f"it places tensors in {file!r}, which is no file of this checkpoint"
    elif fields.get("transform_descriptors"):
        problem = f"it wants a {_kind(fields['transform_descriptors'])} to be applied to {file}"
    elif start + length > files[file].num_bytes:
        problem = f"it places a tensor behind the end of {file}"
    if problem:
        raise _RefusedError(problem)
    return _StorageInfo(file, start, length)


def _size(record: Any) -> torch.Size:
    (sizes,) = _record(record, "Size").arguments
    return torch.Size([_count(each) for each in _of(tuple, sizes)])


def _fields(record: Any, kind: str) -> dict[str, Any]:
    return _of(dict, _record(record, kind).state)


def _record(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or _kind(value) != kind:
        raise _RefusedError(f"it has a {_kind(value)} in the place of a {kind}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        # Python writes no number of thousands of digits.
        shown = f"{value!r:.40}" if type(value) is not int or abs(value) < _MOST else "a number beyond 64 bits"
        raise _RefusedError(f"it has {_kind(value)} {shown} in the place of a count")
    return value


def _of[T](kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise _RefusedError(f"it has a {_kind(value)} in the place of a {kind.__name__}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__


def load_problem(error: Exception) -> str:
    """``error`` in one line, without torch's advice to unpickle the refused file without limits."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"it {may_run(found[1])}"
    lines = [line for line in str(error).splitlines() if line.strip() and "`weights_only`" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else 'it holds more than tensors'}"


def may_run(name: str) -> str:
    return f"asks for {name}, which may run commands; nothing of it was run, do not load it with other programs"
