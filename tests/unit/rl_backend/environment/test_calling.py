"""Calls of what users write: errors that mean something else to a loop, and calls that are given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_backend.environment import Limits
from tests.unit.rl_backend.environment.test_stepping import Guess, play, written


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
            assert "test_calling.py" in episode.error, "the place is that of the user's code"
