"""Shared-memory segments that one process writes and others map, and that never outlive their owner for long.

A segment is a file under /dev/shm whose name carries its owner: process-id namespace, process id and start time.
Whoever makes a segment, and every engine that starts, first removes those of its user whose owners have ended.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from actors.cluster.processes import start_time
from rl_backend.contracts import WeightSyncError

DIRECTORY = Path("/dev/shm")
_PREFIX = "rl_backend_weights"
_NAME = re.compile(rf"{_PREFIX}-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-\d+")
_numbers = itertools.count()
_OF_LIBRARIES = re.compile(r"psm_.*|sem\.mp-.*|.*-cpushm_\d+")
# By which the workers of an engine talk.
_SOCKET = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Segment(NamedTuple):
    """Where a segment is; its path is never used again for another one."""

    path: str
    nbytes: int


class SharedSegment:
    """Shared memory owned by this process, as a (nbytes,) uint8 tensor in ``buffer``; raises where /dev/shm is too small."""

    def __init__(self, nbytes: int) -> None:
        remove_stale_segments()
        self.nbytes = nbytes
        self.path = owned_name()
        _reserve(self.path, nbytes)
        self._owner = os.getpid()
        self.buffer = map_segment(str(self.path), nbytes)
        atexit.register(self.close)

    def close(self) -> None:
        """Unlinks the segment; mappings that exist stay valid until they are dropped. May be called again."""
        if os.getpid() == self._owner:
            self.path.unlink(missing_ok=True)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        atexit.unregister(self.close)


def owned_name() -> Path:
    """A new name in shared memory; what has it is removed after this process has ended, as segments are."""
    return DIRECTORY / f"{_own_prefix()}-{next(_numbers)}"


def remove_own() -> None:
    """Removes all that has an :func:`owned_name` of this process, which is about to end."""
    for path in DIRECTORY.glob(f"{_own_prefix()}-*"):
        path.unlink(missing_ok=True)


def _own_prefix() -> str:
    return f"{_PREFIX}-{_namespace()}-{os.getpid()}-{start_time(os.getpid())}"


def map_segment(path: str, nbytes: int) -> Tensor:
    """Maps a segment of this host as a (nbytes,) uint8 tensor, without a copy."""
    try:
        size = os.stat(path).st_size
    except FileNotFoundError:
        raise WeightSyncError(
            f"shared-memory segment {path} does not exist here; trainer and engine do not share /dev/shm (another host "
            "or container), or its owner ended: use transport='gloo' across hosts",
            path=path,
        ) from None
    # from_file would make a file that is too short longer.
    if size < nbytes:
        raise WeightSyncError(f"shared-memory segment {path} has {size} bytes, expected {nbytes}", path=path)
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def host_identity() -> str:
    """Equal in two processes exactly when they share one kernel and one /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{DIRECTORY.stat().st_dev}"


def stale_segments() -> list[Path]:
    """Segments whose owner has ended, of any user."""
    found = ((path, _NAME.fullmatch(path.name)) for path in DIRECTORY.glob(f"{_PREFIX}-*"))
    return [
        path
        for path, match in found
        if match and match["namespace"] == _namespace() and start_time(int(match["pid"])) != match["start"]
    ]


def remove_stale_segments() -> list[Path]:
    """Removes segments of this user whose owner has ended, and returns them."""
    removed = []
    for path in stale_segments():
        # Other users' segments are theirs to remove, and another process may be removing this one.
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.geteuid():
                path.unlink()
                removed.append(path)
    return removed


def shared_files(pid: int) -> set[Path]:
    """The files of shared memory that a process of this host maps, by the names that they still have."""
    with suppress(OSError):  # it has ended meanwhile
        mapped = {line.split(maxsplit=5)[-1] for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines()}
        return {Path(path) for path in mapped if path.startswith(f"{DIRECTORY}/") and not path.endswith(" (deleted)")}
    return set()


def drop_names(pids: Iterable[int]) -> set[Path]:
    """Takes the names off the shared memory and the sockets that Python and vLLM have made for these processes, and returns
    them. They must have connected by then.

    The processes keep both, which the kernel frees when the last of them ends. One that is killed removes no names.
    """
    found = set[Path]()
    for pid in pids:
        found |= {path for path in shared_files(pid) if _OF_LIBRARIES.fullmatch(path.name)}
        found |= {path for path in _bound_sockets(pid) if _SOCKET.fullmatch(path.name)}
    for path in found:
        path.unlink(missing_ok=True)
    return found


def _bound_sockets(pid: int) -> set[Path]:
    """The files of sockets of the kernel's own kind that a process of this host listens at."""
    opened, sockets = Path("/proc") / str(pid) / "fd", set[str]()
    for descriptor in os.listdir(opened) if opened.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(opened / descriptor))
    # The number of a socket and, of one that is bound, its file are the last two of eight columns.
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()]
    return {Path(line[7]) for line in lines if len(line) == 8 and f"socket:[{line[6]}]" in sockets}


def _reserve(path: Path, nbytes: int) -> None:
    if not DIRECTORY.is_dir():
        raise WeightSyncError("/dev/shm does not exist on this host: mount a tmpfs there or use transport='gloo'")
    space = os.statvfs(DIRECTORY)
    free = space.f_bavail * space.f_frsize
    if free < nbytes:
        raise _no_space(nbytes, free)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Without its pages reserved, a full tmpfs would end the process with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_space(nbytes, free) from None
        raise
    finally:
        os.close(descriptor)


def _no_space(nbytes: int, free: int) -> WeightSyncError:
    return WeightSyncError(
        f"/dev/shm has {free / 2**20:.0f} MiB free, but staging the weights takes {nbytes / 2**20:.0f} MiB: enlarge it "
        "(docker: --shm-size; mount -o remount,size=...) or remove what fills it",
        free=free,
        needed=nbytes,
    )


def _namespace() -> str:
    return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
