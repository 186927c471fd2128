"""Pools of threads and processes that call plain reward functions, many at once, each within a limit of time."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from rl_backend.child_process import start_script
from rl_backend.contracts import RewardError

BEAT_SECONDS = 0.5
_END_SECONDS = 2.0


class EventLoop:
    """Runs coroutines that other threads wait for."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last_beat = time.monotonic()
        # A daemon: the interpreter does not wait for it.
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
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
            # Not at once: the callbacks that tell close() of this coroutine's end must still run.
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


MOST_LEFT_BEHIND = 64
"""Threads with calls that did not end in time. Each holds memory, and what its call holds."""


class TimeLimitError(Exception):
    """A call that did not end in time."""


@dataclass(frozen=True)
class Raised:
    """What a function raised, ``problem`` where that was in another process: futures do not carry every error."""

    error: BaseException | None = None
    problem: str = ""


async def within_limit[T](call: asyncio.Future[T], seconds: float | None) -> T:
    """What the call gives; raises :class:`TimeLimitError` where it does not end in time, None is endless. A call that nobody
    waits for any more is cancelled.
    """
    try:
        done, _ = await asyncio.wait([call], timeout=seconds)
    finally:
        call.cancel()  # unless it is done
    if not done:
        raise TimeLimitError
    if call.cancelled():
        raise RuntimeError("what it waited for was cancelled")
    return call.result()


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Calls it in a daemon thread of its own, whose result is what it returns, or :class:`Raised`."""
    thread = _Thread([function], "environment")
    answer = thread.call(0, {})
    thread.end()
    return answer


class Callee(Protocol):
    """A function, and the name by which another process finds it: ``package.module:function`` or ``file.py:function``."""

    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def spec(self) -> str: ...


class WorkerPool:
    """Calls plain functions from an event loop.

    Args:
        size: calls at once.
        processes: each worker is a process, which the limit of time ends; else a thread, which it leaves behind.
        limit: seconds of a call; None is endless.
        calls, option: what the functions are, and the option that asks for processes, for messages.
    """

    def __init__(
        self,
        functions: Sequence[Callee],
        *,
        size: int,
        processes: bool,
        limit: float | None,
        calls: str = "reward functions",
        option: str = "reward_processes",
    ) -> None:
        self._functions = functions
        self._calls = calls
        self._option = option
        self._processes = processes
        self._limit = limit
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Thread | _Process] = []
        self._started: set[_Process] = set()
        self._loading: list[_Process] = []
        """Of calls that were cancelled in the meantime; the next ones wait for these."""
        self._left_behind: list[_Thread] = []

    async def call(self, index: int, arguments: dict[str, Any]) -> Any:
        """What the function returns, or :class:`Raised`.

        Raises:
            TimeLimitError: it did not end in time.
            RewardError: too many calls did not, and are still running.
        """
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await within_limit(asyncio.wrap_future(worker.call(index, arguments)), self._limit)
            except asyncio.CancelledError:
                # It may still be calling: nobody else may get it.
                self._end(worker)
                raise
            except TimeLimitError:
                self._abandon(worker)
                raise
            if worker.usable:
                self._idle.append(worker)
            else:
                self._abandon(worker)
            return answer

    def close(self) -> None:
        for worker in self._idle:
            worker.end()
        for process in self._started:
            process.end()

    async def _start(self) -> _Thread | _Process:
        if not self._processes:
            return _Thread([each.function for each in self._functions])
        process = self._loading.pop() if self._loading else _Process([each.spec for each in self._functions])
        self._started.add(process)
        try:
            loaded = await asyncio.wrap_future(process.ready)
        except asyncio.CancelledError:
            self._loading.append(process)
            raise
        if isinstance(loaded, Raised) and loaded.error is not None:
            self._end(process)
            raise loaded.error
        return process

    def _end(self, worker: _Thread | _Process) -> None:
        worker.end()
        if isinstance(worker, _Process):
            self._started.discard(worker)

    def _abandon(self, worker: _Thread | _Process) -> None:
        self._end(worker)
        if isinstance(worker, _Process):
            return
        self._left_behind = [each for each in [*self._left_behind, worker] if each.is_alive()]
        if len(self._left_behind) > MOST_LEFT_BEHIND:
            raise RewardError(
                f"{len(self._left_behind)} calls of {self._calls} did not end in time and still go on in threads, which "
                f"cannot be ended; set {self._option}, or have the function limit its own time"
            )


class _Thread:
    def __init__(self, functions: Sequence[Callable[..., Any]], name: str = "reward") -> None:
        self._functions = functions
        self._calls: SimpleQueue[tuple[Future[Any], int, dict[str, Any]] | None] = SimpleQueue()
        # A daemon: the interpreter waits for threads of concurrent.futures when it ends, even for calls that hang.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.usable = True

    def call(self, index: int, arguments: dict[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        # From here on a cancellation cannot make set_result fail in the thread.
        answer.set_running_or_notify_cancel()
        self._calls.put((answer, index, arguments))
        return answer

    def end(self) -> None:
        """After the present call, if there is one."""
        self._calls.put(None)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            answer, index, arguments = asked
            try:
                answer.set_result(self._functions[index](**arguments))
            except BaseException as error:  # noqa: BLE001, who waits for the answer decides
                answer.set_result(Raised(error))


class _Process:
    """``worker.py`` in a process, and the thread that talks to it; ``ready`` ends when the functions are loaded there."""

    def __init__(self, specs: Sequence[str]) -> None:
        self._process, self._connection = start_script(sys.executable, Path(__file__).with_name("worker.py"))
        # It alone reads from the connection, and so closes it: another thread could close one that it reads from.
        self._thread = _Thread([self._load, self._ask, self._connection.close])
        self.usable = True
        self.ready = self._thread.call(0, {"specs": list(specs)})

    def call(self, index: int, arguments: dict[str, Any]) -> Future[Any]:
        return self._thread.call(1, {"request": (index, arguments)})

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.call(2, {})
        self._thread.end()

    def _load(self, specs: list[str]) -> None:
        try:
            self._connection.send((specs, sys.path))
            loaded, problem = self._connection.recv()
        except (EOFError, OSError):
            loaded, problem = False, f"it ended with status {self._process.wait()}"
        if not loaded:
            raise RewardError(
                f"a process cannot load {', '.join(specs)}: {problem}; have importing it need nothing of the run"
            )

    def _ask(self, request: tuple[int, dict[str, Any]]) -> Any:
        try:
            self._connection.send(request)
            returned, result = self._connection.recv()
        except (EOFError, OSError):
            self.usable = False
            return Raised(problem=f"ended its process, with status {self._process.wait()}")
        return result if returned else Raised(problem=f"raised {result}")
