"""Notices code that blocks the event loop of episodes: all of them wait for it, and no limit of time can end it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIRST_SECONDS = 2.0
"""After which it is told, and again after twice as many, and so on."""
_BEAT_SECONDS, _LATE_SECONDS = 0.5, 1.0
logger = logging.getLogger(__name__)


def task_name(function: Any) -> str:
    """Of a task that runs ``function``, a function or an object that is called, for people: ``Game.step``."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type):
        return str(getattr(function, "__qualname__", type(function).__qualname__))
    return f"{type(owner).__qualname__}.{function.__name__}"


@contextmanager
def watched_loop(tell: Callable[[str], None] = logger.warning, first_seconds: float = FIRST_SECONDS) -> Iterator[None]:
    """While it is open, a thread asks the running event loop for signs of life.

    Args:
        tell: given a sentence that names the task and the line that block the loop; called in that thread, while they do.
        first_seconds: see :data:`FIRST_SECONDS`.
    """
    watchdog = _Watchdog(asyncio.get_running_loop(), tell, first_seconds)
    try:
        yield
    finally:
        watchdog.end()


def _lateness(seconds: float) -> str:
    """Where the watchdog itself had to wait, whoever is named may not be to blame."""
    if seconds < _LATE_SECONDS:
        return ""
    return f" (the thread that says so woke {seconds:.1f} s late itself: the machine, or the interpreter, is busy)"


class _Watchdog:
    def __init__(self, loop: asyncio.AbstractEventLoop, tell: Callable[[str], None], first_seconds: float) -> None:
        self._loop, self._tell, self._first = loop, tell, first_seconds
        self._of_loop = threading.get_ident()
        self._answered, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="episodes-watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._answered.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._answered.clear()
            if self._ended.is_set():
                return
            asked, limit = time.monotonic(), self._first
            self._loop.call_soon_threadsafe(self._answered.set)
            while not self._answered.wait(asked + limit - time.monotonic()):
                seconds = time.monotonic() - asked
                self._tell(self._what_blocks(seconds) + _lateness(seconds - limit))
                limit = 2 * seconds

    def _what_blocks(self, seconds: float) -> str:
        task, at = asyncio.current_task(self._loop), ""
        if frame := sys._current_frames().get(self._of_loop):
            # The innermost line: of the environment itself, or of a library that it called.
            place = traceback.extract_stack(frame, limit=1)[-1]
            at = f", at {Path(place.filename).name}:{place.lineno} in {place.name}"
        if task is None:
            return (
                f"the event loop of all episodes has not run for {seconds:.1f} s{at}; it is in no episode's code: a source "
                "of tokens blocks it, or a thread that holds the interpreter"
            )
        return (
            f"{task.get_name()} has blocked the event loop for {seconds:.1f} s{at}; all episodes wait for it: await what "
            "takes time, or make it a plain method, which gets a thread"
        )
