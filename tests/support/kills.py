"""Processes that kill themselves between two events of the file system."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

EVENTS = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate", "os.link"})
"""Audit events of CPython, each raised before the file system is asked; opens for writing and flushes are counted too."""


def kill_at(event: int, where: str) -> Callable[[], int]:
    """From now on this process ends by SIGKILL in place of its ``event``-th change of what lies under ``where``.

    Events are counted from 0; -1 lets all of them happen. A flush counts wherever it is.

    Returns:
        The number of events until it is called.
    """
    count = 0

    def happen() -> None:
        nonlocal count
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # in another thread the signal may come a moment later
        count += 1

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        changes = name in EVENTS or (name == "open" and _writes(arguments))
        if changes and _inside(arguments[0], where):
            happen()

    flush = os.fsync

    def fsync(descriptor: int) -> None:
        happen()
        flush(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    return lambda: count


def killed_at(event: int, where: str, work: Callable[[], None]) -> bool:
    """Runs ``work`` in a fork that :func:`kill_at` ends; False when it came to its end before that event."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kill_at(event, where)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the process ended with status {status}"
    return status == signal.SIGKILL


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2]
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _inside(path: object, where: str) -> bool:
    """``shutil.rmtree`` names what it removes from within the directory."""
    if not isinstance(path, str | os.PathLike):
        return False
    return not os.path.isabs(path) or os.fspath(path).startswith(where)
