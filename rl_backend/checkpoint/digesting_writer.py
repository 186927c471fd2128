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
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        try:
            return self._raw.write(data)
        except OSError as error:
            self.error = error
            raise

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
            try:
                yield stream
            except Exception:
                # torch.save ends its archive all the same, and then tells of that.
                if stream.error is not None:
                    raise OSError(stream.error.errno, stream.error.strerror, str(path)) from None
                raise
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


def file_facts(file: Path, limit: int | None = None) -> FileFacts:
    """Size and digest of a file, or of its first ``limit`` bytes, read in pieces."""
    digest, size = xxhash.xxh3_64(), 0
    for chunk in _chunks(file, limit):
        digest.update(chunk)
        size += len(chunk)
    return FileFacts(num_bytes=size, xxh3=digest.hexdigest())


def _chunks(file: Path, limit: int | None) -> Iterator[bytes]:
    left = _CHUNK if limit is None else limit
    with file.open("rb") as stream:
        while chunk := stream.read(min(left, _CHUNK)):
            yield chunk
            left -= 0 if limit is None else len(chunk)
