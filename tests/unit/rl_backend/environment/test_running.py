from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rl_backend.environment.playing import run_episodes


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


def test_calls_in_threads_are_left_behind() -> None:
    release = threading.Event()

    async def given_up() -> str:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(release.wait, 60), 0.05)
        return "ended"

    with at_most(20.0):
        assert run_episodes(given_up()) == "ended"
    left = [each for each in threading.enumerate() if each.name == "environment" and each.is_alive()]
    assert left and all(each.daemon for each in left), "the interpreter would wait for them when it ends"
    release.set()


def test_calls_that_hang_hold_up_no_others() -> None:
    release = threading.Event()

    async def many() -> int:
        hanging = [asyncio.create_task(asyncio.to_thread(release.wait, 60)) for _ in range(40)]
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(asyncio.to_thread(lambda: 3), 20)
        finally:
            release.set()
            await asyncio.gather(*hanging)

    assert run_episodes(many()) == 3
    with pytest.raises(RuntimeError, match="StopIteration"):
        run_episodes(asyncio.to_thread(next, iter(())))


def test_tasks_that_refuse_to_be_cancelled_are_left_and_named(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    async def refuses() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                told.append("refused")

    async def closes() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            told.append("closed")

    async def play() -> str:
        tasks = [asyncio.create_task(each, name=each.__qualname__.rpartition(".")[2]) for each in (refuses(), closes())]
        await asyncio.sleep(0.01)
        return f"ended before {len(tasks)}"

    with at_most(20.0):
        assert run_episodes(play(), closing_seconds=1.0) == "ended before 2"
    assert told == ["refused", "closed"]
    assert "1 tasks of episodes did not end when they were cancelled, and are left: refuses" in caplog.text


def test_an_interruption_waits_until_episodes_have_closed() -> None:
    told: list[str] = []

    async def interrupts() -> None:
        raise KeyboardInterrupt

    async def play() -> None:
        task = asyncio.create_task(interrupts())
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            told.append(f"closed, {task.done()}")

    with pytest.raises(KeyboardInterrupt):
        run_episodes(play(), closing_seconds=0.01)
    assert told == ["closed, True"], "an episode has a limit of time of its own, which is longer"
