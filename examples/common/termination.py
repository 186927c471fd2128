"""SIGTERM, with which schedulers and ``ray job stop`` end a run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit status of a run that SIGTERM ended, as of any program that it ends."""

_REPEATED_SECONDS = 10.0
"""Who sends a signal to a process and to its group sends it twice; that must not cut the clean-up short."""


class RunTerminated(KeyboardInterrupt):
    """This process got SIGTERM. What ends a run on Ctrl-C ends it on this too, and ``except Exception`` lets both pass."""

    def __init__(self) -> None:
        super().__init__("SIGTERM")


@contextmanager
def raised_on_sigterm() -> Iterator[None]:
    """SIGTERM raises :class:`RunTerminated` in the main thread, and so does what comes of it; elsewhere nothing changes.

    Enter it after ``ray.init``, which has SIGTERM raise a SystemExit that nothing tells from a reward function's own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except BaseException as error:
        if (terminated := termination()) is not None and not isinstance(error, RunTerminated):
            raise terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if before is not _terminate:
            _received.clear()


def termination() -> RunTerminated | None:
    """What ends a run that got SIGTERM: a call into Ray that it ends raises a plain KeyboardInterrupt. None without one."""
    return RunTerminated() if _received else None


def raise_if_terminated() -> None:
    """Raises :class:`RunTerminated` again after code of the user, which may have caught it."""
    if _received:
        raise RunTerminated


_received: list[float] = []


def _terminate(_: int, __: FrameType | None) -> None:
    now = time.monotonic()
    repeated = bool(_received) and now - _received[-1] < _REPEATED_SECONDS
    if not repeated:
        _received.append(now)
        raise RunTerminated
