"""Two hundred episodes at once, of which three raise and one hangs: what the others are worth beside the same ones alone.

Environments take 0 to 2 seconds a step. Half of them are asynchronous, the others run in threads.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from actors import RolloutGroup, RolloutTokens
from actors.cluster.session import ray_session
from benchmarks.environment_tasks import bpe_tokenizer
from benchmarks.environment_waves import TURN_TOKENS, engine_config, shape_of
from benchmarks.report import machine
from rl_backend.environment import (
    Episode,
    GroupTask,
    Limits,
    PlayOptions,
    Step,
    StepOptions,
    SteppedPlayer,
    Turn,
    play_episode,
    play_groups,
)

EPISODES, RAISE, HANGS = 200, (20, 91, 160), 131
LIMITS = Limits(turn_tokens=TURN_TOKENS // 2, step_seconds=10.0)


class SlowGame:
    """Ids in, ids out, for as many turns as its shape has; the row says what goes wrong in it."""

    tools = ()
    closed: ClassVar[Counter[int]] = Counter()

    def __init__(self, row: Mapping[str, Any], seed: int) -> None:
        self.row = row
        self.ids, self.steps = shape_of(seed, row["vocabulary"])

    def start(self) -> list[int]:
        return self.ids

    async def step(self, turn: Turn) -> Step:
        await asyncio.sleep(self.seconds())
        return self.answer(turn)

    def seconds(self) -> float:
        if self.row["fails"] == "raises":
            raise ValueError("no such door")
        return self.steps[0][0] * float(self.row["wait"])

    def answer(self, turn: Turn) -> Step:
        _, answer = self.steps.pop(0)
        self.ids = [*self.ids, *turn.token_ids, *answer]
        return Step(token_ids=self.ids, reward=1.0, done=not self.steps)

    def close(self) -> None:
        SlowGame.closed[self.row["number"]] += 1


class ThreadedGame(SlowGame):
    """With a plain step, which gets a thread."""

    def step(self, turn: Turn) -> Step:  # type: ignore[override]
        if self.row["fails"] == "hangs":
            threading.Event().wait(2 * (LIMITS.step_seconds or 0))
        time.sleep(self.seconds())
        return self.answer(turn)


def make(row: Mapping[str, Any], seed: int) -> SlowGame:
    """Asynchronous and plain ones in turn."""
    return (ThreadedGame if row["number"] % 2 else SlowGame)(row, seed)


def measure() -> dict[str, Any]:
    """Over engines of its own; see :func:`measure_over`."""
    with tempfile.TemporaryDirectory() as folder, ray_session(1, 1), RolloutGroup(engine_config(Path(folder))) as rollout:
        return {"failures": {**measure_over(rollout), "machine": machine()}}


def measure_over(rollout: RolloutGroup) -> dict[str, Any]:
    """How the episodes ended, and whether those that are whole have the tokens of the same ones played one by one."""
    tokens = RolloutTokens(rollout)
    player = SteppedPlayer(make, bpe_tokenizer(), StepOptions(limits=LIMITS))
    row = {"vocabulary": tokens.vocab_size, "wait": 1.0, "fails": ""}
    fails = {**dict.fromkeys(RAISE, "raises"), HANGS: "hangs"}
    rows = [{**row, "number": number, "fails": fails.get(number, "")} for number in range(EPISODES)]
    tasks = [GroupTask(each, number, [number]) for number, each in enumerate(rows)]
    options = PlayOptions(LIMITS, "drop", fewest=1)
    SlowGame.closed.clear()
    started = time.perf_counter()
    groups = asyncio.run(play_groups(player, tasks, tokens, options))
    seconds = time.perf_counter() - started
    closed = dict(SlowGame.closed)
    whole = {number: group.episodes[0] for number, group in enumerate(groups) if group.episodes}

    def alone(number: int) -> Episode:
        calm = {**rows[number], "wait": 0.0}
        return asyncio.run(play_episode(player, calm, tokens, sampling_seed=number, seed=number, limits=LIMITS))

    started = time.perf_counter()
    pairs = [(episode, alone(number)) for number, episode in whole.items()]
    seconds_alone = time.perf_counter() - started
    waits = [seconds for number in range(EPISODES) for seconds, _ in shape_of(number)[1]]
    return {
        "episodes": EPISODES,
        "stops": dict(Counter(each.stop for group in groups for each in (*group.episodes, *group.dropped))),
        "errors": sorted({each.error.split(" (")[0] for group in groups for each in group.dropped}),
        "closed_once": closed == dict.fromkeys(range(EPISODES), 1),
        "tokens_equal": all(ids_of(one) == ids_of(other) for one, other in pairs),
        "log_probs_apart": max(
            abs(first - second)
            for one, other in pairs
            for turn, same in zip(one.turns, other.turns, strict=True)
            for first, second in zip(turn.log_probs, same.log_probs, strict=True)
        ),
        "turns": sum(len(episode.turns) for episode in whole.values()),
        "seconds_at_once": seconds,
        "seconds_one_by_one_without_waits": seconds_alone,
        "seconds_of_waits": sum(waits),
    }


def ids_of(episode: Episode) -> list[Any]:
    """What is trained of it, and where."""
    return [(list(each.token_ids), list(each.sampled), list(each.rewards)) for each in episode.segments]
