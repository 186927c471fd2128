"""Event loops of episodes: they end with their episodes, whatever these leave behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl_backend.environment.calling import outcome
from rl_backend.environment.playing import CLOSING_SECONDS
from rl_backend.environment.watchdog import logger


def run_episodes[T](coroutine: Coroutine[Any, Any, T], *, closing_seconds: float = CLOSING_SECONDS) -> T:
    """As ``asyncio.run``, which waits without a limit for tasks that do not let themselves be cancelled, and for minutes for
    calls of ``asyncio.to_thread``. Both may go on after a limit of time has ended their episode. Here calls get a daemon
    thread each, for which nobody waits, and tasks have ``closing_seconds`` for their last words.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(_DaemonThreads())
    main: list[asyncio.Task[T]] = []

    async def whole() -> T:
        main.extend(task for task in [asyncio.current_task()] if task is not None)
        return await coroutine

    try:
        return runner.run(whole())
    finally:
        try:
            # After a Ctrl-C this one is left too: episodes close what they opened, for which players have a limit of time.
            _end(loop, [task for task in main if not task.done()], None)
            _end(loop, asyncio.all_tasks(loop), closing_seconds)
            _end(loop, [loop.create_task(loop.shutdown_asyncgens())], closing_seconds, cancel=False)
        finally:
            # Not the runner's: it would wait for the tasks that are left.
            asyncio.set_event_loop(None)
            loop.close()


def _end(
    loop: asyncio.AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]], seconds: float | None, *, cancel: bool = True
) -> None:
    waiting = list(tasks)
    if not waiting:
        return
    for task in waiting if cancel else ():
        task.cancel()
    done, left = loop.run_until_complete(asyncio.wait(waiting, timeout=seconds))
    for task in done:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as forgotten
    if left:
        names = ", ".join(sorted({task.get_name() for task in left}))
        logger.warning("%d tasks of episodes did not end when they were cancelled, and are left: %s", len(left), names)


class _DaemonThreads(ThreadPoolExecutor):
    """The interpreter waits for threads of concurrent.futures when it ends, even for calls that hang; and few of those would
    hold up everyone else's.
    """

    def submit[**P, T](self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called: Future[T] = Future()

        def run() -> None:
            if not called.set_running_or_notify_cancel():
                return
            result, raised = outcome(lambda: function(*args, **kwargs))
            if raised is None:
                called.set_result(result)
            else:
                called.set_exception(raised)

        threading.Thread(target=run, name="environment", daemon=True).start()
        return called
