"""Calls of what users write: errors that mean something else to a loop, and calls that are given up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rl_backend.contracts import EpisodeFailedError
from rl_backend.environment import Limits, play_episode
from rl_backend.environment.stepping import SteppedPlayer
from rl_backend.environment.user_code import Caller, close_late
from tests.unit.rl_backend.environment.test_stepping import TOKENIZER, Guess, play, written


@pytest.fixture(autouse=True)
def _made() -> None:
    Guess.made = []


@pytest.mark.shows("environments: StopIteration, or a cancellation of its own, is an error that ends its episode alone")
@pytest.mark.parametrize("raised", [StopIteration, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["__init__", "start", "step", "close"])
def test_errors_that_futures_and_tasks_take_for_something_else(where: str, raised: type[BaseException]) -> None:
    def plain(self: Any, *given: Any) -> Any:
        raise raised("no more")

    async def cancelled(self: Any, *given: Any) -> Any:
        waiting = asyncio.ensure_future(asyncio.sleep(60))
        waiting.cancel()
        await waiting

    methods = [plain] if raised is StopIteration or where == "__init__" else [plain, cancelled]
    for method in methods:
        episode = play(type("Wrong", (Guess,), {where: method}), written("3", "4"), limits=Limits(step_seconds=5.0))
        assert episode.stop == ("done" if where == "close" else "error")
        told = "what it waited for was cancelled" if method is cancelled else f"{raised.__name__}: no more"
        assert told in episode.error
        if raised is StopIteration:
            assert "test_user_code.py" in episode.error, "the place is that of the user's code"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("where", ["start", "step", "close"])
def test_an_exit_of_an_asynchronous_method_ends_its_episode_alone(where: str, waits: bool) -> None:
    async def leaves(self: Any, *given: Any) -> Any:
        raise SystemExit(3)

    method = leaves if waits else lambda self, *given: leaves(self)
    kind: Any = type("Leaves", (Guess,), {where: method})
    player = SteppedPlayer(kind, TOKENIZER)
    others = SteppedPlayer(Guess, TOKENIZER)

    async def both() -> list[Any]:
        played = [play_episode(each, {}, written("4"), sampling_seed=1, seed=1) for each in (player, others)]
        return list(await asyncio.gather(*played))

    left, other = asyncio.run(both())
    assert left.stop == ("done" if where == "close" else "error") and (other.stop, other.reward) == ("done", 1.0)
    assert "it ended its task by SystemExit: 3" in left.error and "test_user_code.py" in left.error


@pytest.mark.shows("environments: one that is made after its episode was ended is closed all the same")
@pytest.mark.parametrize("ended", ["step_seconds", "episode_seconds", "the moment it is made"])
@pytest.mark.parametrize("waits", [False, True])
def test_an_environment_that_is_made_too_late_is_closed(ended: str, waits: bool) -> None:
    release, closed = threading.Event(), threading.Event()

    class Late(Guess):
        def __init__(self, row: Any, seed: int) -> None:
            super().__init__(row, seed)
            release.wait(60)

        def close(self) -> Any:
            async def later() -> None:
                await asyncio.sleep(0)
                closed.set()

            return later() if waits else closed.set()

    if ended == "the moment it is made":
        asyncio.run(_given_up_when_made(Late, release))
    else:
        assert play(Late, written("3"), limits=Limits.model_validate({ended: 0.1})).stop == "timeout"
    assert not closed.is_set() or release.is_set()
    release.set()
    assert closed.wait(20), "the container that it holds would be left"


async def _given_up_when_made(make: Any, release: threading.Event) -> None:
    """The thread has returned, and the loop has not seen it yet."""
    before = threading.enumerate()
    task = asyncio.create_task(Caller()(make, {}, 1, on_late=close_late))
    await asyncio.sleep(0.05)
    (thread,) = [each for each in threading.enumerate() if each not in before]
    release.set()
    thread.join(20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_goes_wrong_when_it_is_closed_late_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Jams:
        def close(self) -> None:
            raise OSError("jammed")

    close_late(object())
    close_late(Jams())
    assert "close of an environment that was made too late failed: OSError: jammed" in caplog.text


@pytest.mark.parametrize("cancelled", [False, True])
def test_threads_that_are_left_behind_are_counted_whoever_gave_them_up(cancelled: bool) -> None:
    release, before = threading.Event(), threading.active_count()

    async def many() -> None:
        caller = Caller()
        calls = [asyncio.create_task(caller(release.wait, 60, seconds=None if cancelled else 0.2)) for _ in range(65)]
        await asyncio.sleep(0.05)
        for call in calls if cancelled else ():
            call.cancel()
        raised = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(each, EpisodeFailedError) for each in raised) == (0 if cancelled else 1)
        with pytest.raises(EpisodeFailedError, match="65 calls of environments did not end in time"):
            await caller(int)
        assert await caller(int, frees=True) == 0, "environments are closed even then"
        release.set()
        while await caller(threading.active_count, frees=True) > before + 30:
            await asyncio.sleep(0.01)
        assert await caller(int) == 0, "those that have ended count no more"

    asyncio.run(many())
