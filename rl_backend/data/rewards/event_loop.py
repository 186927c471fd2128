"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 0.5
_END_SECONDS = 2.0


class EventLoop:
    """Runs coroutines that other threads wait for. Its thread is a daemon, which the interpreter does not wait for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """Since the loop could last run what it is asked to."""
        return time.monotonic() - self._last_beat

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancels everything and ends; a loop that is blocked is left to its thread."""

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_END_SECONDS)
            self._loop.call_soon(self._loop.stop)

        with suppress(TimeoutError):
            self.run(end()).result(timeout=2 * _END_SECONDS)
        self._thread.join(timeout=_END_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._beat()
        self._loop.run_forever()
        self._loop.close()

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        self._loop.call_later(BEAT_SECONDS, self._beat)
