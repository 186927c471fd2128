"""Turns of episodes from running engines: as they come, over pushes, and what they are worth to the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors.rollout.config import SamplingConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Sample
from actors.rollout.tokens import RolloutTokens
from actors.sync.push import WeightSync
from rl_backend.contracts import BatchError, WeightVersionError
from rl_backend.environment.protocol import Generation
from tests.support.rollout import ReferenceTrainer
from tests.support.turns import as_sample, ask, converse, in_the_middle, part_of, until_in_flight

TOLERANCE = 1e-5
PROMPTS = [[5, 6, 7], list(range(20, 60)), [9], [100, 90, 80, 70], list(range(3, 120))]
LONG = 300


@pytest.fixture
def group(rollout_pair: RolloutGroup, rollout_sync: WeightSync) -> Iterator[RolloutGroup]:
    """The engines, serving the trainer's weights; turns finish before a push."""
    rollout_sync.push()
    yield rollout_pair
    rollout_pair.engine_set.call("set_turns_at_push", "finish")


@pytest.fixture
def tokens(group: RolloutGroup) -> RolloutTokens:
    return RolloutTokens(group)


@pytest.mark.shows("turns: tokens are those of one generate call with the same seeds, whoever else is served")
def test_turns_that_come_one_by_one_are_the_samples_of_one_call(group: RolloutGroup, tokens: RolloutTokens) -> None:
    prompts, seeds = PROMPTS * 2, list(range(10))
    samples = group.generate(prompts, SamplingConfig(max_new_tokens=8), seeds=seeds)

    async def staggered() -> list[Generation]:
        async def later(index: int) -> Generation:
            await asyncio.sleep(0.02 * (index % 4))
            return await ask(tokens, prompts[index], seeds[index], 8)

        return await asyncio.gather(*map(later, range(10)))

    turns = asyncio.run(staggered())
    assert [list(turn.token_ids) for turn in turns] == [sample.response_ids for sample in samples]
    assert [list(turn.versions) for turn in turns] == [sample.weight_versions for sample in samples]
    for turn, sample in zip(turns, samples, strict=True):
        assert turn.log_probs == pytest.approx(sample.log_probs, abs=TOLERANCE)
    assert {turn.finish for turn in turns} == {"length"}
    stop = samples[0].response_ids[2]
    stopped = asyncio.run(ask(tokens, prompts[0], 0, 8, [stop]))
    whole = samples[0].response_ids
    assert stopped.finish == "stop" and stopped.token_ids == whole[: whole.index(stop) + 1]


def test_a_short_turn_is_answered_while_longer_ones_and_a_call_that_samples_go_on(
    group: RolloutGroup, tokens: RolloutTokens
) -> None:
    async def overtake() -> None:
        long = [asyncio.ensure_future(ask(tokens, [5, 6], seed, LONG)) for seed in range(2)]
        await until_in_flight(group, 2)
        call = group.submit(PROMPTS, SamplingConfig(max_new_tokens=200))
        short = await ask(tokens, [7, 8], 3, 2)
        assert len(short.token_ids) == 2
        assert not call.done() and not any(turn.done() for turn in long)
        assert [len(turn.token_ids) for turn in await asyncio.gather(*long)] == [LONG, LONG]
        assert len(call.result()) == len(PROMPTS)

    asyncio.run(overtake())


def test_turns_are_cancelled_or_given_up_and_the_others_go_on(group: RolloutGroup, tokens: RolloutTokens) -> None:
    async def give_up() -> None:
        whole = await ask(tokens, [5, 6], 1, LONG)
        cancelled, stays = (asyncio.ensure_future(ask(tokens, [5, 6], seed, LONG)) for seed in (0, 1))
        await until_in_flight(group, 2)
        cancelled.cancel()
        assert (await stays).token_ids == whole.token_ids
        assert cancelled.cancelled()
        await until_in_flight(group, 0)
        (given_up,), _ = await in_the_middle(group, [ask(tokens, [5, 6], 1, LONG)], tokens.give_up)
        assert given_up.finish == "abort" and 0 < len(given_up.token_ids) < LONG
        assert given_up.token_ids == whole.token_ids[: len(given_up.token_ids)]
        assert len(given_up.log_probs) == len(given_up.versions) == len(given_up.token_ids)

    asyncio.run(give_up())


def test_a_turn_that_no_engine_can_answer_fails_alone(group: RolloutGroup, tokens: RolloutTokens) -> None:
    async def mixed() -> list[Any]:
        prompts = ([5, 6], [7] * 384, [5, 128], [], [8])
        return await asyncio.gather(*(ask(tokens, prompt, 1, 3) for prompt in prompts), return_exceptions=True)

    good, long, unknown, empty, other = asyncio.run(mixed())
    assert len(good.token_ids) == len(other.token_ids) == 3
    for error, message in ((long, "has 384 tokens"), (unknown, "token ids from 5 to 128"), (empty, "has 0 tokens")):
        assert isinstance(error, BatchError) and message in str(error)
    tokens.require_version = 10**6
    with pytest.raises(WeightVersionError, match="version 1000000 is required"):
        asyncio.run(ask(tokens, [5], 1, 1))


@pytest.mark.shows(
    "turns: log-probs over all turns of a conversation are the trainer's to 1e-5, with its beginning from the prefix cache"
)
def test_log_probs_of_later_turns_are_the_trainers_with_their_beginnings_from_the_cache(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, tokens: RolloutTokens
) -> None:
    async def all_of_them() -> list[list[Sample]]:
        prompts = [[3 + (7 * number + each) % 120 for each in range(40 + number)] for number in range(6)]
        return await asyncio.gather(
            *(converse(tokens, prompt, seed, turns=4, most=30) for seed, prompt in enumerate(prompts))
        )

    samples = [sample for each in asyncio.run(all_of_them()) for sample in each]
    assert max(rollout_trainer.gaps(samples)) <= TOLERANCE
    assert 0.5 < tokens.cached_share < 1


async def push_in_mid_turn(
    group: RolloutGroup, tokens: RolloutTokens, sync: WeightSync
) -> tuple[list[Generation], Generation, dict[str, float]]:
    """Two turns, one on each engine, a push in the middle of them, and a turn that is asked for during the push."""
    late: list[asyncio.Task[Generation]] = []
    loop = asyncio.get_running_loop()

    def push() -> dict[str, float]:
        loop.call_soon_threadsafe(lambda: late.append(asyncio.ensure_future(ask_during_the_push())))
        return sync.push().seconds

    async def ask_during_the_push() -> Generation:
        await asyncio.sleep(0.02)
        return await ask(tokens, [44, 45], 3, 4)

    turns, seconds = await in_the_middle(group, [ask(tokens, [5, 6, number], number, LONG) for number in range(2)], push)
    return turns, await late[0], seconds


@pytest.mark.shows("turns: a push in mid-turn, the turns finish first: all their tokens are of the weights before")
def test_a_push_waits_for_turns_and_later_ones_have_its_weights(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, rollout_sync: WeightSync, tokens: RolloutTokens
) -> None:
    async def expected() -> list[Generation]:
        return await asyncio.gather(*(ask(tokens, [5, 6, number], number, LONG) for number in range(2)))

    whole = asyncio.run(expected())
    before = rollout_trainer.source.version
    rollout_trainer.advance()
    turns, late, seconds = asyncio.run(push_in_mid_turn(group, tokens, rollout_sync))
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in whole]
    assert {version for turn in turns for version in turn.versions} == {before}
    assert seconds["turns"] > 0
    after = asyncio.run(ask(tokens, [44, 45], 3, 4))
    assert set(after.versions) == {before + 1}
    if set(late.versions) == {before + 1}:
        assert late.token_ids == after.token_ids
    assert rollout_trainer.mean_gap([as_sample([44, 45], after)]) <= TOLERANCE


@pytest.mark.shows(
    "turns: a push in mid-turn, the turns pause: tokens before it keep version and log-probs, those after it are the new "
    "weights', keys and values computed anew, each to 1e-5 of its trainer's"
)
def test_a_push_pauses_turns_which_continue_with_its_weights(
    group: RolloutGroup, rollout_trainer: ReferenceTrainer, rollout_sync: WeightSync, tokens: RolloutTokens
) -> None:
    group.engine_set.call("set_turns_at_push", "pause")
    before = rollout_trainer.source.version
    old = ReferenceTrainer.__new__(ReferenceTrainer)
    old.model = rollout_trainer.copy_of_model()
    rollout_trainer.advance()
    turns, late, _ = asyncio.run(push_in_mid_turn(group, tokens, rollout_sync))
    for number, turn in enumerate(turns):
        kept = list(turn.versions).count(before)
        assert list(turn.versions) == [before] * kept + [before + 1] * (LONG - kept) and 0 < kept < LONG
        prompt = [5, 6, number]
        assert max(old.gaps([part_of(turn, prompt, 0, kept)])) <= TOLERANCE
        assert max(rollout_trainer.gaps([part_of(turn, prompt, kept, LONG)])) <= TOLERANCE
    assert set(late.versions) <= {before, before + 1}


def test_turns_that_pause_for_the_same_weights_are_what_they_are_without_a_push(
    group: RolloutGroup, rollout_sync: WeightSync, tokens: RolloutTokens
) -> None:
    group.engine_set.call("set_turns_at_push", "pause")

    async def expected() -> list[Generation]:
        return await asyncio.gather(*(ask(tokens, [5, 6, number], number, LONG) for number in range(2)))

    whole = asyncio.run(expected())
    turns, late, seconds = asyncio.run(push_in_mid_turn(group, tokens, rollout_sync))
    assert [turn.token_ids for turn in turns] == [turn.token_ids for turn in whole]
    assert len(late.token_ids) == 4 and len(set(turns[0].versions)) == 1 and "turns" in seconds


@pytest.mark.long
@pytest.mark.shows(
    "turns: kill -9 of an engine in mid-episode: its turns are asked again of another, with the same tokens; others go on"
)
def test_turns_of_an_engine_that_dies_are_asked_again_of_another(
    group: RolloutGroup, rollout_sync: WeightSync, tokens: RolloutTokens
) -> None:
    prompts = [[5, 6, number] for number in range(4)]
    expected = group.generate(prompts, SamplingConfig(max_new_tokens=LONG), seeds=range(4))

    async def play() -> list[Any]:
        turns = [ask(tokens, prompts[seed], seed, LONG) for _ in range(2) for seed in range(4)]
        running = [asyncio.ensure_future(turn) for turn in turns]
        await until_in_flight(group, 8)
        assert set(group.turns.in_flight.values()) == {4}
        os.kill(group.infos[1].pid, signal.SIGKILL)
        return await asyncio.gather(*running)

    turns = asyncio.run(play())
    whole = [sample.response_ids for sample in expected]
    assert [turn.token_ids for turn in turns] == whole * 2
    deadline = time.monotonic() + 120
    while group.engines != (0, 1):  # it is replaced, and has the weights that were pushed
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert group.describe()[1].version == group.describe()[0].version
    assert asyncio.run(ask(tokens, prompts[0], 0, LONG)).token_ids == whole[0]
