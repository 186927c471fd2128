"""Memory of a node that outlives the processes that wrote it: files without a name, which another process holds open.

The kernel frees such a file when the last process that has it open ends, however that ends.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import ray

from actors.cluster.processes import start_time
from rl_backend.lab.doctor.machine import read_memory

# Of what is sent from node to node at one time.
_CHUNK = 32 * 2**20
_THREADS = 16
ANSWERS = "answers"
"""Concurrency group of what a holder answers at once: two holders whose pulls take all other threads wait for each other."""
_MEMORY = "rl_backend_boundary"


class Written(NamedTuple):
    """A file without a name, which ``path`` reaches on its node while the process of that path has it open.

    ``end`` bytes of it count; those from ``table`` on say what the rest is.
    """

    path: str
    table: int
    end: int


def nameless_file(nbytes: int = 0) -> tuple[int, str]:
    """Makes one of zeros; the descriptor is the caller's. Its memory is taken when it is written to."""
    descriptor = os.memfd_create(_MEMORY)
    os.ftruncate(descriptor, nbytes)
    return descriptor, path_of(descriptor)


def path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class HeldKey(NamedTuple):
    """What is held: the part that a rank has of a model, after the operation of that number."""

    model: int
    rank: int
    number: int


class MemoryHolder:
    """Holds what ranks have written, for its node and for others."""

    # Imports no torch: it starts at once and is small.
    def __init__(self) -> None:
        self._files: dict[HeldKey, int] = {}
        # Model -> the number before which nothing of it is held any more.
        self._dropped: dict[int, float] = {}
        self._taking = threading.Lock()

    @ray.method(concurrency_group=ANSWERS)  # type: ignore[untyped-decorator]
    def ping(self) -> tuple[int, str]:
        """Its process: number, and when it started."""
        return os.getpid(), start_time(os.getpid())

    def keep(self, key: HeldKey, written: Written | str | None) -> Written | str | None:
        """Holds what a process of this node has written; answers where it is now, or the problem that it was given."""
        if not isinstance(written, Written):
            return written
        descriptor = os.open(written.path, os.O_RDWR | os.O_CLOEXEC)
        self._hold(key, descriptor)
        return written._replace(path=path_of(descriptor))

    def pull(self, key: HeldKey, other: Any, written: Written | str | None) -> Written | str | None:
        """Copies what a holder of another node holds; answers as :meth:`keep`, or that there is no room for it here."""
        if not isinstance(written, Written):
            return written
        descriptor = self._take(written.end)
        if isinstance(descriptor, str):
            return descriptor
        try:
            for start, chunk in _chunks(other, key, 0, written.end):
                os.pwrite(descriptor, chunk, start)
        except BaseException:
            os.close(descriptor)
            raise
        # Not before: a descriptor that is closed meanwhile would be the next file's.
        self._hold(key, descriptor)
        return written._replace(path=path_of(descriptor))

    @ray.method(concurrency_group=ANSWERS)  # type: ignore[untyped-decorator]
    def read(self, key: HeldKey, start: int, end: int) -> Any:
        return np.frombuffer(os.pread(self._files[key], end - start, start), dtype=np.uint8)

    def drop(self, model: int, before: float) -> None:
        """Frees what is held of a model after operations of smaller numbers."""
        self._dropped[model] = before = max(before, self._dropped.get(model, before))
        for key in list(self._files):
            if key.model == model and key.number < before and (descriptor := self._files.pop(key, None)) is not None:
                os.close(descriptor)

    def _take(self, nbytes: int) -> int | str:
        """A file with all of its memory, or why there is none: the kernel would end some process of this node instead."""
        with self._taking:
            _, available = read_memory()
            if nbytes > available:
                return f"no room there: it takes {nbytes / 2**20:.0f} MiB, and {available / 2**20:.0f} MiB are free"
            descriptor = nameless_file(nbytes)[0]
            with suppress(OSError):  # at once, so that no other pull finds it free
                os.posix_fallocate(descriptor, 0, nbytes)
            return descriptor

    def _hold(self, key: HeldKey, descriptor: int) -> None:
        self._files[key] = descriptor
        if key.number < self._dropped.get(key.model, key.number):  # while it was copied
            self.drop(key.model, self._dropped[key.model])


def fetch(holder: Any, key: HeldKey, start: int, end: int) -> Any:
    """(end - start,) uint8 of what a holder of another node holds."""
    found = np.empty(end - start, dtype=np.uint8)
    for at, chunk in _chunks(holder, key, start, end):
        found[at - start : at - start + len(chunk)] = chunk
    return found


def _chunks(holder: Any, key: HeldKey, start: int, end: int) -> Any:
    for at in range(start, end, _CHUNK):
        yield at, ray.get(holder.read.remote(key, at, min(at + _CHUNK, end)))


HolderActor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_THREADS, concurrency_groups={ANSWERS: 4})(MemoryHolder)
