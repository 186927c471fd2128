"""Signals that end a command."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

EXIT_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """SIGTERM raises :class:`SystemExit` with status 143 in the main thread, so that ``finally`` ends what was started."""

    def leave(_: int, __: FrameType | None) -> None:
        # A second signal must not cut the clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
