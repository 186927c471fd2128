"""Files of ``torch.distributed.checkpoint``: digested while they are written, and read without running anything."""

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from rl_backend.checkpoint.confined import require_inside
from rl_backend.checkpoint.manifest import FileFacts, damaged
from rl_backend.checkpoint.stored_metadata import METADATA_FILE, load_problem, stored_metadata
from rl_backend.contracts import CheckpointError, name_of_dtype

_CHUNK = 1 << 22


class _DigestingFile(io.BufferedWriter):
    """Writes to a file and into a digest; written bytes cannot be changed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        with self._noted():
            return super().write(data)

    def flush(self) -> None:
        with self._noted():
            super().flush()

    @contextmanager
    def _noted(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            self.error = error
            raise

    def seek(self, *args: Any) -> NoReturn:
        raise io.UnsupportedOperation("seek")

    def fileno(self) -> int:
        # The caller is about to flush the file to the disk.
        self.flush()
        return super().fileno()

    def facts(self) -> FileFacts:
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        assert mode == "wb", "a FileSystemWriter only writes"
        stream = _DigestingFile(path)
        try:
            # Closing writes what the buffer holds: a full disk may show there first, or once more.
            with stream:
                yield stream
        except Exception:
            # torch.save still ends its archive, and then reports that instead.
            if stream.error is not None:
                raise OSError(stream.error.errno, stream.error.strerror, str(path)) from None
            raise
        self.written[Path(path).name] = stream.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class DigestingWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that keeps size and digest of this rank's files.

    The digest is of the bytes handed to the file system: it finds what a disk changes later.

    Attributes:
        written: file name -> facts, of the files of this rank.
    """

    def __init__(self, path: Path) -> None:
        # Copying ahead waits for the current CUDA stream, which in another thread is another device's, or training's.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = files = _DigestingFileSystem()
        self.written = files.written


def file_facts(file: Path, limit: int | None = None) -> FileFacts:
    """Size and digest of a file, or of its first ``limit`` bytes, read in pieces."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK if limit is None else min(limit - size, _CHUNK)):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(num_bytes=size, xxh3=digest.hexdigest())


def require_written(path: Path, name: str, facts: FileFacts | None) -> None:
    """Raises :class:`CheckpointError` unless ``name`` in the checkpoint ``path`` has the bytes that were written."""
    try:
        found = file_facts(path / name)
    except OSError as error:
        raise CheckpointError(f"{path / name} cannot be read: {error}", path=str(path), name=name) from error
    if found != facts:
        raise damaged(path, name, f"{name} has other bytes than were written")


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorsReader(FileSystemReader):
    """Reads the tensors of a checkpoint. ``.metadata`` is read once, and nothing in a file is run.

    Every element of every tensor is stored exactly once, and every piece read is checked against ``.metadata``.

    Args:
        path: the checkpoint's directory.
        files: of its manifest; data is read from no others.

    Attributes:
        metadata: the pieces of each tensor, and their files.

    Raises:
        CheckpointError: as :func:`~rl_backend.checkpoint.stored_metadata.stored_metadata`.
    """

    def __init__(self, path: Path, files: Mapping[str, FileFacts]) -> None:
        super().__init__(path)
        self.metadata = stored_metadata(path, files)
        self._sizes = {
            MetadataIndex(name, chunk.offsets): chunk.sizes
            for name, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def require_stored(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
        """Checks shape and dtype of a stored tensor before any of it is read.

        Args:
            dtype: of the tensor to fill. Floating ones convert, others must be equal; None is not compared.

        Raises:
            CheckpointError: there is no such tensor, or it has another shape or dtype.
        """
        stored = self.metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            self._refuse(name, "does not have it", f"in shape {shape}")
        if tuple(stored.size) != shape:
            self._refuse(name, f"has it in shape {tuple(stored.size)}", f"in shape {shape}")
        found = stored.properties.dtype
        if dtype is not None and found != dtype and not (found in _FLOATS and dtype in _FLOATS):
            self._refuse(name, f"has it as {name_of_dtype(found)}", f"as {name_of_dtype(dtype)}")

    def _refuse(self, name: str, found: str, expected: str) -> NoReturn:
        raise damaged(Path(self.path), name, f"its {METADATA_FILE} {found}, {name} was expected {expected}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises :class:`CheckpointError` with the file's name where it holds other tensors than ``.metadata`` says."""
        stored: dict[MetadataIndex, _StorageInfo] = self.metadata.storage_data
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(stored[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            file = require_inside(Path(self.path), name)
            try:
                with file.open("rb") as stream:
                    for item in items:
                        piece = self._piece(stream, item.storage_index, stored[item.storage_index])
                        part = zip(item.storage_offsets, item.lengths, strict=True)
                        target = planner.resolve_tensor(item)
                        target.detach().copy_(piece[tuple(slice(start, start + length) for start, length in part)])
                        planner.commit_tensor(item, target)
            except Exception as error:
                raise CheckpointError(
                    f"{file} is refused, {load_problem(error)}; take an earlier checkpoint", path=str(self.path), name=name
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, stream: IO[bytes], index: MetadataIndex, place: _StorageInfo) -> Tensor:
        piece: Tensor = torch.load(self._slice_file(stream, place), map_location="cpu", weights_only=True)
        told = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(told, TensorStorageMetadata), "others are refused when they are converted"
        expected = _described(told.properties.dtype, self._sizes[index])
        found = _described(piece.dtype, piece.shape) if isinstance(piece, Tensor) else str(type(piece))
        if found != expected:
            raise ValueError(f"it has {found} of {index.fqn} where {METADATA_FILE} says {expected}")
        return piece


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{name_of_dtype(dtype)} {tuple(shape)}"
