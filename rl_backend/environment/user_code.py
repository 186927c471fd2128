"""Calls of users' code: asynchronous functions as they are, plain ones in threads, each within a limit of time.

A watchdog names code that blocks the event loop of episodes, where no limit of time can end it.
"""

import asyncio
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rl_backend.contracts import EpisodeFailedError
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.data.rewards.worker_pool import MOST_LEFT_BEHIND, Raised, TimeLimitError, in_thread, within_limit

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

    ``tell`` is given, in that thread, a sentence that names the task and the line that block the loop.
    """
    watchdog = _Watchdog(asyncio.get_running_loop(), tell, first_seconds)
    try:
        yield
    finally:
        watchdog.end()


def _lateness(seconds: float) -> str:
    # Where the watchdog itself had to wait, whoever is named may not be to blame.
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
            # Looked at once more: end() may have set both between the wait and the line above.
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


class Caller:
    """Calls functions of users. Plain ones get a daemon thread each: the interpreter does not wait for one that hangs."""

    def __init__(self) -> None:
        self._left_behind: list[Future[Any]] = []

    async def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float | None = None,
        on_late: Callable[[Any], None] | None = None,
        frees: bool = False,
    ) -> Any:
        """What the function returns, or raises.

        Args:
            seconds: limit of the call; None is endless.
            on_late: given what a plain function returns after all when nobody waits for it any more; called in a thread.
            frees: the function frees what others hold, so it is called however many threads are left.

        Raises:
            TimeLimitError: it did not end in time. A plain function continues in its thread, which cannot be ended.
            EpisodeFailedError: too many such threads are left.
            RuntimeError: StopIteration, SystemExit or a cancellation inside of it.
        """
        # No StopIteration, cancellation of its own or SystemExit gets out as such: it would hang the caller, pass for the
        # end of the run, or end the loop.
        if inspect.iscoroutinefunction(function):
            result = await within_limit(
                asyncio.create_task(_awaited(function(*arguments)), name=task_name(function)), seconds
            )
        else:
            result = await self._in_thread(lambda: function(*arguments), seconds, on_late, frees)
        if not inspect.isawaitable(result):
            return result
        return await within_limit(asyncio.create_task(_awaited(result), name=task_name(function)), seconds)

    async def _in_thread(
        self, function: Callable[[], Any], seconds: float | None, on_late: Callable[[Any], None] | None, frees: bool
    ) -> Any:
        if not frees:
            self._check()
        call = in_thread(function)
        try:
            result = await within_limit(asyncio.wrap_future(call), seconds)
        except TimeLimitError:
            self._leave(call, on_late)
            self._check()
            raise
        except asyncio.CancelledError:
            self._leave(call, on_late)
            raise
        if isinstance(result, Raised):
            raise as_exception(result)
        return result

    def _leave(self, call: Future[Any], on_late: Callable[[Any], None] | None) -> None:
        def late(done: Future[Any]) -> None:
            # In a thread: where the call has just ended, this one is the loop's.
            if on_late is not None and not isinstance(done.result(), Raised):
                in_thread(partial(on_late, done.result()))

        call.add_done_callback(late)
        self._left_behind = [each for each in [*self._left_behind, call] if not each.done()]

    def _check(self) -> None:
        if len(self._left_behind) <= MOST_LEFT_BEHIND:
            return
        self._left_behind = [each for each in self._left_behind if not each.done()]
        if len(self._left_behind) > MOST_LEFT_BEHIND:
            raise EpisodeFailedError(
                f"{len(self._left_behind)} calls of environments did not end in time and still go on in threads, which "
                "cannot be ended; make their methods asynchronous, or have them limit their own time"
            )


def as_exception(raised: Raised) -> Exception:
    """An error that a future carries and that ends no loop."""
    error = raised.error
    if isinstance(error, StopIteration):
        stopped = RuntimeError(f"it raised {type(error).__name__}: {error}".removesuffix(": "))
        return stopped.with_traceback(error.__traceback__)
    return error if isinstance(error, Exception) else RuntimeError(f"it ended its thread by {type(error).__name__}: {error}")


def close_late(environment: Any) -> None:
    """Closes an environment that nobody waits for any more; in a thread."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        closing = close()
        # In a loop of its own: the one of the episodes may be gone.
        if inspect.isawaitable(closing):
            asyncio.run(_awaited(closing))
    except (Exception, SystemExit) as error:  # noqa: BLE001, a user's code may raise anything, and no episode is left to say it
        logger.warning("close of an environment that was made too late failed: %s", what_it_raised(error))


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # a task that raises it ends the loop, and with it every other episode
        raised = RuntimeError(f"it ended its task by {type(error).__name__}: {error}")
        raise raised.with_traceback(error.__traceback__) from None
