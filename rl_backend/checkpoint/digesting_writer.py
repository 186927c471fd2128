"""Files of ``torch.distributed.checkpoint`` whose bytes are digested while they are written."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from rl_backend.checkpoint.manifest import FileFacts

_CHUNK = 1 << 22


class _DigestingStream(io.IOBase):
    """What is written goes to a file and into a digest; nothing can be changed afterwards."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._digest = xxhash.xxh3_64()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return self._raw.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def fileno(self) -> int:
        # Whoever asks is about to flush the file to the disk.
        self._raw.flush()
        return self._raw.fileno()

    def facts(self) -> FileFacts:
        return FileFacts(num_bytes=self._size, xxh3=self._digest.hexdigest())


class _DigestingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, FileFacts] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            if mode != "wb":
                yield raw
                return
            stream = _DigestingStream(cast("IO[bytes]", raw))
            yield stream
            self.written[Path(path).name] = stream.facts()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class DigestingWriter(FileSystemWriter):
    """A ``FileSystemWriter`` that knows what this rank has written.

    The digest is of the bytes that were handed to the file system, so that what a disk changes later is found.
    """

    def __init__(self, path: Path) -> None:
        # Copying ahead waits for the current CUDA stream, which in a thread of its own is another device's, or training's.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs = self._digesting = _DigestingFileSystem()

    @property
    def written(self) -> dict[str, FileFacts]:
        """File name -> facts, of the files of this rank."""
        return dict(self._digesting.written)


def file_facts(file: Path) -> FileFacts:
    """Size and digest of a file, read in pieces."""
    digest, size = xxhash.xxh3_64(), 0
    for chunk in _chunks(file):
        digest.update(chunk)
        size += len(chunk)
    return FileFacts(num_bytes=size, xxh3=digest.hexdigest())


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
