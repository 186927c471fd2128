"""Calls of an environment's methods: asynchronous ones as they are, plain ones in threads, each within a limit of time."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rl_backend.contracts import EpisodeFailedError
from rl_backend.data.rewards.pool import MOST_LEFT_BEHIND, TimeLimitError
from rl_backend.environment.watchdog import task_name


class Caller:
    """Calls functions of users. Plain ones get a daemon thread each: the interpreter does not wait for one that hangs."""

    def __init__(self) -> None:
        self._left_behind: list[threading.Thread] = []

    async def __call__(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """What the function returns, or raises. Neither a StopIteration nor a cancellation of its own gets here as such: it
        would hang the caller, or pass for the end of the run, so it is a RuntimeError.

        Args:
            seconds: limit of the call; None is endless.

        Raises:
            TimeLimitError: it did not end in time. A plain function goes on in its thread, which cannot be ended.
            EpisodeFailedError: too many such threads are left.
        """
        thread: threading.Thread | None = None
        call: asyncio.Future[Any]
        if inspect.iscoroutinefunction(function):
            call = asyncio.create_task(function(*arguments), name=task_name(function))
        else:
            thread, call = _in_thread(function, arguments)
        result = await self._wait(call, seconds, thread)
        if not inspect.isawaitable(result):
            return result
        return await self._wait(asyncio.create_task(_awaited(result), name=task_name(function)), seconds, None)

    async def _wait(self, call: asyncio.Future[Any], seconds: float | None, thread: threading.Thread | None) -> Any:
        try:
            done, _ = await asyncio.wait([call], timeout=seconds)
        except asyncio.CancelledError:
            call.cancel()
            raise
        if done:
            if call.cancelled():
                raise RuntimeError("what it waited for was cancelled")
            return call.result()
        call.cancel()
        if thread is not None:
            self._left_behind = [each for each in [*self._left_behind, thread] if each.is_alive()]
            if len(self._left_behind) > MOST_LEFT_BEHIND:
                raise EpisodeFailedError(
                    f"{len(self._left_behind)} calls of environments did not end in time and still go on in threads, which "
                    "cannot be ended; make their methods asynchronous, or have them limit their own time"
                )
        raise TimeLimitError


def outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function returns, and what it raises, as an error that a future carries; for its thread."""
    try:
        return function(), None
    except StopIteration as error:  # a future refuses it, and would never end
        raised = RuntimeError(f"it raised {type(error).__name__}: {error}".removesuffix(": "))
        return None, raised.with_traceback(error.__traceback__)
    except Exception as error:  # noqa: BLE001, raised in the loop, where the episode is
        return None, error
    except BaseException as error:  # noqa: BLE001, sys.exit and the like must not end the loop
        return None, RuntimeError(f"it ended its thread by {type(error).__name__}: {error}")


def _in_thread(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[threading.Thread, asyncio.Future[Any]]:
    loop = asyncio.get_running_loop()
    call: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if call.done():
            return
        if error is None:
            call.set_result(result)
        else:
            call.set_exception(error)

    def run() -> None:
        result, raised = outcome(lambda: function(*arguments))
        with suppress(RuntimeError):  # the loop may be gone when a call that was given up ends
            loop.call_soon_threadsafe(settle, result, raised)

    thread = threading.Thread(target=run, name="environment", daemon=True)
    thread.start()
    return thread, call


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
