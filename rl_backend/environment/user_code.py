"""Calls of users' code: asynchronous functions as they are, plain ones in threads, each within a limit of time.

A watchdog names code that blocks the event loop of episodes, where no limit of time can end it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rl_backend.contracts import EpisodeFailedError
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.data.rewards.worker_pool import MOST_LEFT_BEHIND, TimeLimitError

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
        self._left_behind: list[threading.Thread] = []

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
            result = await _ended(asyncio.create_task(_awaited(function(*arguments)), name=task_name(function)), seconds)
        else:
            result = await self._in_thread(lambda: function(*arguments), seconds, on_late, frees)
        if not inspect.isawaitable(result):
            return result
        return await _ended(asyncio.create_task(_awaited(result), name=task_name(function)), seconds)

    async def _in_thread(
        self, function: Callable[[], Any], seconds: float | None, on_late: Callable[[Any], None] | None, frees: bool
    ) -> Any:
        if not frees:
            self._check()
        call = _ThreadCall(function, on_late)
        try:
            return await _ended(call.result, seconds)
        except TimeLimitError:
            self._leave(call)
            self._check()
            raise
        except asyncio.CancelledError:
            self._leave(call)
            raise

    def _leave(self, call: _ThreadCall) -> None:
        call.give_up()
        self._left_behind = [each for each in [*self._left_behind, call.thread] if each.is_alive()]

    def _check(self) -> None:
        if len(self._left_behind) <= MOST_LEFT_BEHIND:
            return
        self._left_behind = [each for each in self._left_behind if each.is_alive()]
        if len(self._left_behind) > MOST_LEFT_BEHIND:
            raise EpisodeFailedError(
                f"{len(self._left_behind)} calls of environments did not end in time and still go on in threads, which "
                "cannot be ended; make their methods asynchronous, or have them limit their own time"
            )


def outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function returns, and what it raises, as an error that a future carries."""
    try:
        return function(), None
    except StopIteration as error:  # a future refuses it, and would never end
        raised = RuntimeError(f"it raised {type(error).__name__}: {error}".removesuffix(": "))
        return None, raised.with_traceback(error.__traceback__)
    except Exception as error:  # noqa: BLE001, raised in the loop, where the episode is
        return None, error
    except BaseException as error:  # noqa: BLE001, sys.exit and the like must not end the loop
        return None, RuntimeError(f"it ended its thread by {type(error).__name__}: {error}")


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


class _ThreadCall:
    """A call in a thread, whose result somebody gets: who waits for it, or ``on_late``."""

    def __init__(self, function: Callable[[], Any], on_late: Callable[[Any], None] | None) -> None:
        self._function, self._on_late = function, on_late
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._lock = threading.Lock()
        self._returned: list[Any] = []
        self._given_up = False
        self.thread = self._start(self._run)

    def give_up(self) -> None:
        with self._lock:
            self._given_up, returned = True, bool(self._returned)
        if returned:  # at the same moment, so that nobody has its result
            self._start(self._late)

    def _start(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="environment", daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        result, raised = outcome(self._function)
        with self._lock:
            given_up = self._given_up
            if raised is None:
                self._returned.append(result)
        if not given_up:
            with suppress(RuntimeError):  # the loop may be gone by now
                self._loop.call_soon_threadsafe(self._settle, result, raised)
        elif raised is None:
            self._late()

    def _settle(self, result: Any, error: Exception | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(result)
        else:
            self.result.set_exception(error)

    def _late(self) -> None:
        if self._on_late is not None:
            self._on_late(self._returned[0])


async def _ended(call: asyncio.Future[Any], seconds: float | None) -> Any:
    try:
        done, _ = await asyncio.wait([call], timeout=seconds)
    except asyncio.CancelledError:
        call.cancel()
        raise
    if not done:
        call.cancel()
        raise TimeLimitError
    if call.cancelled():
        raise RuntimeError("what it waited for was cancelled")
    return call.result()


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # a task that raises it ends the loop, and with it every other episode
        raised = RuntimeError(f"it ended its task by {type(error).__name__}: {error}")
        raise raised.with_traceback(error.__traceback__) from None
