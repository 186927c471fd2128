"""Shared memory for the factors of adapters, where trainer, driver and engines are on one host."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from typing import Any

import ray

from actors.wire.segment import DIRECTORY, Segment, SharedSegment
from rl_backend.contracts import WeightSyncError

_MOST_SPARE = 2
"""Segments that are kept for the next pushes: new memory takes the system longer to give than factors take to copy."""

_FREE_SHARE = 0.5
"""Of /dev/shm that stays free: Ray's store takes its pages there as it fills, and pushes of weights theirs."""


class AdapterMemory:
    """Segments, each with the factors of one version for as long as an engine may read them.

    They are the driver's: engines that start later read what is served, whatever has become of the trainer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_use: dict[str, SharedSegment] = {}
        self._read: list[tuple[SharedSegment, list[Any]]] = []
        """No longer served, and the calls after whose end no engine reads them."""
        self._spare: list[SharedSegment] = []
        self._closed = False

    def take(self, nbytes: int) -> Segment:
        """At least ``nbytes``, to be written to.

        Raises:
            WeightSyncError: /dev/shm has no room to spare, or :meth:`close` was called.
        """
        with self._lock:
            if self._closed:
                raise WeightSyncError("the rollout group is closed")
            self._collect()
            fitting = [segment for segment in self._spare if segment.nbytes >= nbytes]
            segment = min(fitting, key=lambda segment: segment.nbytes, default=None)
            if segment is None:
                _require_room(nbytes)
                segment = SharedSegment(nbytes)
            else:
                self._spare.remove(segment)
            self._in_use[str(segment.path)] = segment
            return Segment(str(segment.path), segment.nbytes)

    def give_back(self, path: str, calls: Collection[Any]) -> None:
        """Of a segment that nobody reads after these calls of engines have ended."""
        with self._lock:
            segment = self._in_use.pop(path, None)
            if segment is not None:  # or all were removed in the meantime
                self._read.append((segment, list(calls)))
                self._collect()

    def discard(self, path: str) -> None:
        """Of a segment that somebody may still write to: it is not used again."""
        with self._lock:
            segment = self._in_use.pop(path, None)
            if segment is not None:
                segment.close()

    def close(self) -> None:
        """Removes all; what is mapped stays readable where it is."""
        with self._lock:
            self._closed = True
            for segment in (*self._in_use.values(), *(segment for segment, _ in self._read), *self._spare):
                segment.close()
            self._in_use, self._read, self._spare = {}, [], []

    def _collect(self) -> None:
        spare, still_read = list(self._spare), []
        for segment, calls in self._read:
            # Ray counts a call of an engine that has died as ended.
            if calls and ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)[1]:
                still_read.append((segment, calls))
            else:
                spare.append(segment)
        # At once: an interrupted wait must not leave a segment in both.
        self._read, self._spare = still_read, spare
        while len(self._spare) > _MOST_SPARE:
            self._spare.pop(0).close()


def _require_room(nbytes: int) -> None:
    space = os.statvfs(DIRECTORY)
    free = space.f_bavail * space.f_frsize - nbytes
    if free < _FREE_SHARE * space.f_blocks * space.f_frsize:
        raise WeightSyncError(f"/dev/shm would have {free / 2**20:.0f} MiB free, less than {_FREE_SHARE:.0%} of it")
