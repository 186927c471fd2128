"""What blocks the event loop of episodes is named while it does."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rl_backend.environment import Result, Sampler, Step, Turn
from rl_backend.environment.groups import GroupTask, PlayOptions, play_groups
from rl_backend.environment.protocol import Player
from rl_backend.environment.stepping import SteppedPlayer
from rl_backend.environment.user_code import _lateness, watched_loop
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.token_sources import RandomSource

TOKENIZER = chat_tokenizer(CHATML)


class Sleeper:
    """Its step blocks the loop, in a call of its own, for as long as the row says."""

    tools = ()

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.seconds = row["seconds"]

    def start(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": "?"}]

    async def step(self, turn: Turn) -> Step:
        time.sleep(self.seconds)
        return Step(done=True)


class PlainSleeper(Sleeper):
    def step(self, turn: Turn) -> Step:  # type: ignore[override]
        time.sleep(self.seconds)
        return Step(done=True)


class ReturnsAwaitable(Sleeper):
    def step(self, turn: Turn) -> Any:
        return super().step(turn)


async def blocking_player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    time.sleep(row["seconds"])
    return Result()


def told_of(player: Player, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told while one episode of several is played."""
    told: list[str] = []
    monkeypatch.setattr("rl_backend.environment.groups.watched_loop", lambda tell: watched_loop(tell, first_seconds=0.3))
    tasks = [GroupTask({"seconds": each}, 0, [1]) for each in (0.0, seconds)]
    source = RandomSource(context_tokens=512, vocab_size=len(TOKENIZER))
    asyncio.run(play_groups(player, tasks, source, PlayOptions(on_blocked=told.append)))
    return told


@pytest.mark.shows("environments: one that blocks the event loop is named while it does, with its line and the seconds")
@pytest.mark.parametrize("make", [Sleeper, ReturnsAwaitable])
def test_an_asynchronous_step_that_blocks_is_named(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = told_of(SteppedPlayer(make, TOKENIZER), 1.0, monkeypatch)
    assert re.match(rf"{make.__name__}\.step has blocked the event loop for \d+\.\d s, at ", told[0])
    line = Sleeper.step.__code__.co_firstlineno + 1
    assert f"at test_watchdog.py:{line} in step; all episodes wait for it: await what takes time" in told[0]
    assert len(told) <= 3, "at twice the seconds again, and so on"


def test_a_player_that_blocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_of(blocking_player, 1.0, monkeypatch)[0].startswith("blocking_player has blocked the event loop for ")


def test_a_watchdog_that_woke_late_says_so() -> None:
    assert _lateness(0.2) == "" and "woke 3.1 s late itself: the machine" in _lateness(3.1)


def test_plain_steps_block_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_of(SteppedPlayer(PlainSleeper, TOKENIZER), 1.2, monkeypatch) == []


def watched(work: Callable[[], Any], tell: Callable[[str], None]) -> None:
    async def run() -> None:
        with watched_loop(tell, first_seconds=0.2):
            await work()

    asyncio.run(run())


def test_a_callback_that_blocks_is_told_by_its_line() -> None:
    told: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 1.5)
        await asyncio.sleep(0.3)

    watched(work, told.append)
    assert re.match(r"the event loop of all episodes has not run for .* s, at .* it is in no episode's code", told[0])


def test_a_loop_that_waits_is_not_blocked_and_leaves_no_thread() -> None:
    told: list[str] = []
    watched(lambda: asyncio.sleep(0.8), told.append)
    assert told == []
    assert "episodes-watchdog" not in {thread.name for thread in threading.enumerate()}


def test_without_a_listener_it_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_backend.environment.groups.watched_loop", lambda tell: watched_loop(tell, first_seconds=0.2))
    with caplog.at_level(logging.WARNING):
        tasks = [GroupTask({"seconds": 1.0}, 0, [1])]
        asyncio.run(play_groups(blocking_player, tasks, RandomSource()))
    assert "blocking_player has blocked the event loop" in caplog.text
