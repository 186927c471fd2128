"""What a cookbook environment is asked for and what becomes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.cookbook import STOPS, CookbookPlayer
from rl_backend.contracts import BatchError, ConfigError, EpisodeEndError
from rl_backend.environment.protocol import Result


class Sampler:
    """Gives turns as they are written; notes prompts, stops, rewards and turns that are left out."""

    seed = 11

    def __init__(self, *turns: Any) -> None:
        self.turns, self.noted = list(turns), list[Any]()

    async def sample(self, token_ids: Sequence[int], *, stop_token_ids: Sequence[int]) -> Any:
        self.noted.append(("asked", list(token_ids), list(stop_token_ids)))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return SimpleNamespace(token_ids=(turn, 7), finish="stop" if turn % 2 else "length")

    def reward(self, value: float) -> None:
        self.noted.append(("reward", value))

    def leave_out(self) -> None:
        self.noted.append("left out")


class Observation:
    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def to_ints(self) -> list[int]:
        return self.ids


def step(reward: float, done: bool, following: Any = None, stops: Any = (), **metrics: float) -> Any:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return SimpleNamespace(
        reward=reward, episode_done=done, next_observation=following, next_stop_condition=stops, metrics=named
    )


class Env:
    def __init__(self, first: Any, *steps: Any) -> None:
        self.first, self.steps, self.actions = first, list(steps), list[Any]()

    async def initial_observation(self) -> Any:
        return self.first

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        self.actions.append((action, extra))
        return self.steps.pop(0)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(each) for each in text]


def play(env: Any, sampler: Any, row: Mapping[str, Any] | None = None) -> Result:
    made: list[Any] = []

    def make(row: Mapping[str, Any], seed: int) -> Any:
        made.append((row, seed))
        return env

    result = asyncio.run(CookbookPlayer(make, Tokenizer())(row or {"a": 1}, sampler))
    assert made == [(row or {"a": 1}, 11)]
    return result


def test_each_turn_is_asked_with_its_own_stops_and_metrics_are_added_up() -> None:
    env = Env(
        (Observation(1, 2), ["a", "b"]),
        step(0.5, False, Observation(3), [9, 8], parse_error_masked=1, tokens=2.0),
        step(-1, False, Observation(4, 5), (), parse_error_masked=0, tokens=3, other=1),
        step(2, True, None, None, stop__max_turns=1.0, stop__completed=0.0),
    )
    sampler = Sampler(21, 22, 23)
    result = play(env, sampler)
    assert sampler.noted == [
        ("asked", [1, 2], [97, 98]),
        ("reward", 0.5),
        "left out",
        ("asked", [3], [9, 8]),
        ("reward", -1.0),
        ("asked", [4, 5], []),
        ("reward", 2.0),
    ]
    assert env.actions == [
        ([21, 7], {"stop_reason": "stop"}),
        ([22, 7], {"stop_reason": "length"}),
        ([23, 7], {"stop_reason": "stop"}),
    ]
    assert (result.stop, result.reward) == ("turns", 0.0)
    assert result.metrics == {
        "parse_error_masked": 1.0,
        "tokens": 5.0,
        "other": 1.0,
        "stop/max_turns": 1.0,
        "stop/completed": 0.0,
    }


@pytest.mark.parametrize(("reason", "stop"), [*STOPS.items(), ("unheard_of", "done"), ("", "done")])
def test_the_reason_for_which_the_last_step_ended_is_that_of_the_episode(reason: str, stop: str) -> None:
    metrics = {f"stop__{reason}": 1} if reason else {}
    assert play(Env((Observation(1), []), step(0, True, **metrics)), Sampler(1)).stop == stop
    first = SimpleNamespace(reward=0.25, metrics={f"stop/{reason}": 1} if reason else {"n": 2})
    found = play(Env(first), Sampler())
    assert (found.stop, found.reward, found.metrics) == (stop, 0.25, first.metrics)


def test_a_limit_of_our_own_ends_an_episode_with_the_metrics_so_far() -> None:
    env = Env((Observation(1), []), step(1, False, Observation(2), [], n=2), step(1, False, Observation(3), [], n=3))
    result = play(env, Sampler(1, 2, EpisodeEndError("limits.tokens=9", stop="tokens")))
    assert (result.stop, result.error, result.metrics) == ("tokens", "limits.tokens=9", {"n": 5.0})


def test_a_step_that_takes_too_long_ends_the_episode() -> None:
    class Slow(Env):
        async def step(self, action: list[int], *, extra: Any = None) -> Any:
            await asyncio.sleep(60)

    player = CookbookPlayer(lambda row, seed: Slow((Observation(1), [])), Tokenizer(), step_seconds=0.05)
    sampler: Any = Sampler(1)
    result = asyncio.run(player({}, sampler))
    assert (
        result.stop == "timeout"
        and "longer than limits.step_seconds" in result.error
        and sampler.noted == [("asked", [1], [])]
    )


def test_what_cannot_go_on_is_an_error() -> None:
    with pytest.raises(BatchError, match="goes on with an empty observation; have it end the episode"):
        play(Env((Observation(1), []), step(0, False, Observation(), [])), Sampler(1))
    for text, tokens in (("ab", 2), ("", 0)):
        with pytest.raises(ConfigError, match=f"stop condition='{text}': is {tokens} tokens; only an end of one token"):
            play(Env((Observation(1), [5, text])), Sampler(1))
