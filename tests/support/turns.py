"""Turns of episodes, asked of running engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Routes, Sample, VersionSpan
from actors.rollout.tokens import RolloutTokens
from rl_backend.environment.protocol import Generation


async def ask(tokens: RolloutTokens, prompt: Sequence[int], seed: int, most: int, stop: Sequence[int] = ()) -> Generation:
    """A turn of at most ``most`` tokens."""
    return await tokens.generate(prompt, seed=seed, stop_token_ids=stop, max_tokens=most)


def as_sample(prompt: Sequence[int], turn: Generation) -> Sample:
    """A turn of one weight version as the sample that a call gives."""
    span = VersionSpan(turn.versions[0], len(turn.token_ids))
    routes = None if turn.routes is None else Routes(turn.routes, span.version)
    return Sample(0, 0, list(prompt), list(turn.token_ids), list(turn.log_probs), "length", (span,), 0, routes)


def part_of(turn: Generation, prompt: Sequence[int], start: int, end: int) -> Sample:
    """The tokens of a turn from ``start`` to ``end``, which have one version, as a sample behind those before them."""
    part = Generation(turn.token_ids[start:end], turn.log_probs[start:end], "length", turn.versions[start:end])
    return as_sample([*prompt, *turn.token_ids[:start]], part)


async def converse(tokens: RolloutTokens, prompt: Sequence[int], seed: int, turns: int, most: int) -> list[Sample]:
    """Turns, each of which begins with those before and three tokens more."""
    samples = []
    for turn in range(turns):
        answer = await ask(tokens, prompt, 100 * seed + turn, most)
        samples.append(as_sample(prompt, answer))
        prompt = [*prompt, *answer.token_ids, 5 + seed, 9, 11]
    return samples


async def until(true: Callable[[], bool]) -> None:
    """Waits for something without blocking the loop."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def until_in_flight(group: RolloutGroup, turns: int) -> None:
    """Waits until engines have so many turns."""
    await until(lambda: sum(group.turns.in_flight.values()) == turns)


async def in_the_middle(group: RolloutGroup, turns: Sequence[Awaitable[Generation]], then: Callable[[], Any]) -> Any:
    """Calls something in a thread when engines sample some turns and none has ended; the turns, and its result."""
    running = [asyncio.ensure_future(turn) for turn in turns]
    await until_in_flight(group, len(turns))
    # A few tokens: on a machine that does much else the first takes longest.
    await asyncio.sleep(0.2)
    assert not any(turn.done() for turn in running)
    result = await asyncio.to_thread(then)
    return await asyncio.gather(*running), result
