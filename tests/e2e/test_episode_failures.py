"""Hundreds of episodes at once on running engines, of which some fail."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from actors import RolloutTokens
from actors.rollout.group import RolloutGroup
from actors.sync.push import WeightSync
from benchmarks.environment_tasks import bpe_tokenizer
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
MOST_TURNS, PROMPT_TOKENS, ANSWER_TOKENS, MOST_SECONDS = 6, 48, 8, 2.0
STEP_SECONDS = 10.0
LIMITS = Limits(turn_tokens=16, step_seconds=STEP_SECONDS)


class SlowGame:
    """Token ids in, token ids out, for one to six turns; its row says what goes wrong in it."""

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
            threading.Event().wait(2 * STEP_SECONDS)
        time.sleep(self.seconds())
        return self.answer(turn)


def shape_of(seed: int, vocabulary: int) -> tuple[list[int], list[tuple[float, list[int]]]]:
    """The prompt of an episode, and for each turn the seconds that its environment takes and its answer."""
    draw = random.Random(seed)
    turns = draw.randint(1, MOST_TURNS)
    steps = [(draw.uniform(0, MOST_SECONDS), draw.choices(range(vocabulary), k=ANSWER_TOKENS)) for _ in range(turns)]
    return draw.choices(range(vocabulary), k=PROMPT_TOKENS), steps


def make(row: Mapping[str, Any], seed: int) -> SlowGame:
    """Asynchronous and plain ones in turn."""
    return (ThreadedGame if row["number"] % 2 else SlowGame)(row, seed)


def ids_of(episode: Episode) -> list[Any]:
    """What is trained of it, and where."""
    return [(list(each.token_ids), list(each.sampled), list(each.rewards)) for each in episode.segments]


@pytest.mark.long
@pytest.mark.shows(
    "environments: of 200 episodes at once on vLLM, with steps of 0 to 2 seconds, three that raise and one that hangs end "
    "alone; the others have the tokens that they have one by one"
)
def test_two_hundred_episodes_on_engines_of_which_four_fail(rollout_pair: RolloutGroup, rollout_sync: WeightSync) -> None:
    rollout_sync.push()
    tokens = RolloutTokens(rollout_pair)
    player = SteppedPlayer(make, bpe_tokenizer(), StepOptions(limits=LIMITS))
    fails = {**dict.fromkeys(RAISE, "raises"), HANGS: "hangs"}
    rows = [
        {"vocabulary": tokens.vocab_size, "wait": 1.0, "number": number, "fails": fails.get(number, "")}
        for number in range(EPISODES)
    ]
    tasks = [GroupTask(row, number, [number]) for number, row in enumerate(rows)]
    SlowGame.closed.clear()
    started = time.perf_counter()
    groups = asyncio.run(play_groups(player, tasks, tokens, PlayOptions(LIMITS, "drop", fewest=1)))
    seconds = time.perf_counter() - started

    assert SlowGame.closed == dict.fromkeys(range(EPISODES), 1)
    ended = Counter(each.stop for group in groups for each in (*group.episodes, *group.dropped))
    assert ended == {"done": EPISODES - 4, "error": 3, "timeout": 1}
    errors = {each.error.split(" (")[0] for group in groups for each in group.dropped}
    assert errors == {"ValueError: no such door", "a step took longer than limits.step_seconds"}
    waits = [wait for number in range(EPISODES) for wait, _ in shape_of(number, tokens.vocab_size)[1]]
    assert seconds < sum(waits) / 4

    for number, group in enumerate(groups):
        for episode in group.episodes:
            row = {**rows[number], "wait": 0.0}
            alone = asyncio.run(play_episode(player, row, tokens, sampling_seed=number, seed=number, limits=LIMITS))
            assert ids_of(episode) == ids_of(alone)
            for turn, same in zip(episode.turns, alone.turns, strict=True):
                assert turn.log_probs == pytest.approx(same.log_probs, rel=0, abs=1e-5)
