from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rl_backend.contracts import BatchError, EpisodeEndError
from rl_backend.environment import Limits
from rl_backend.environment.sampler import RecordingSampler, turn_seed
from tests.support.token_sources import RandomSource, generation


def sampler(source: Any, **limits: Any) -> RecordingSampler:
    return RecordingSampler(source, sampling_seed=11, seed=3, limits=Limits(**limits))


def stop_of(sampler: RecordingSampler, prompt: Sequence[int], **asked: Any) -> str:
    with pytest.raises(EpisodeEndError) as error:
        asyncio.run(sampler.sample(prompt, **asked))
    return str(error.value.details["stop"])


def test_turns_are_recorded_as_they_were_sampled() -> None:
    source = RandomSource(routed=True)
    mine = sampler(source)
    first = asyncio.run(mine.sample([1, 2], max_tokens=3))
    prompt = [1, 2, *first.token_ids, 9]
    source.version = 1
    second = asyncio.run(mine.sample(prompt, max_tokens=2))
    mine.reward(0.5)
    (segment,) = mine.segments
    assert segment.token_ids == (*prompt, *second.token_ids)
    assert segment.versions == (-1, -1, 0, 0, 0, -1, 1, 1)
    assert segment.routes is not None and segment.routes[:, 0, 1].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert [turn.reward for turn in mine.turns] == [0.0, 0.5] and mine.seed == 3
    assert mine.turns[1].routes is None and second.routes is not None
    assert mine.metrics() | {"engine_seconds": 0} == {
        "turns": 2, "segments": 1, "sampled_tokens": 5, "prompt_tokens": 8, "cached_tokens": 0,
        "tool_calls": 0, "failed_tool_calls": 0, "engine_seconds": 0,
    }  # fmt: skip
    mine.leave_out()
    assert [turn.trained for turn in mine.turns] == [True, False] and sum(mine.segments[0].sampled) == 3


def test_seeds_of_turns_differ_and_the_first_is_the_episodes_own() -> None:
    assert turn_seed(11, 0) == 11
    assert len({turn_seed(seed, turn) for seed in (11, 12, 2**63 - 1) for turn in range(9)}) == 27
    assert all(0 <= turn_seed(2**63 - 1, turn) < 2**63 for turn in range(9))


def test_the_context_is_checked_before_the_engine_is_asked() -> None:
    source = RandomSource(context_tokens=8)
    mine = sampler(source)
    assert len(asyncio.run(mine.sample([1] * 5)).token_ids) == 3
    assert stop_of(mine, [1] * 8) == "context"
    assert stop_of(mine, [1]) == "context"  # once over, it stays so
    assert len(source.prompts) == 1


@pytest.mark.parametrize(
    ("limits", "stop"),
    [({"turns": 2}, "turns"), ({"sampled_tokens": 7}, "tokens"), ({"episode_tokens": 12}, "tokens")],
)
def test_each_limit_ends_the_episode_by_its_name(limits: dict[str, int], stop: str) -> None:
    mine = sampler(RandomSource(), **limits)
    for length in (2, 6):
        asyncio.run(mine.sample([1] * length, max_tokens=4))
    assert stop_of(mine, [1] * 12, max_tokens=4) == stop
    assert mine.metrics()["sampled_tokens"] == (7 if stop == "tokens" and "sampled_tokens" in limits else 8)


def test_a_turn_has_no_more_tokens_than_its_own_limit() -> None:
    mine = sampler(RandomSource(), turn_tokens=3)
    assert len(asyncio.run(mine.sample([1])).token_ids) == 3
    for asked, given in ((2, 2), (3, 3), (4, 3), (60, 3)):
        assert len(asyncio.run(mine.sample([1], max_tokens=asked)).token_ids) == given
    tighter = sampler(RandomSource(context_tokens=40), turn_tokens=30, sampled_tokens=25, episode_tokens=20)
    assert [len(asyncio.run(tighter.sample([1] * length, max_tokens=50)).token_ids) for length in (1, 17, 2)] == [19, 3, 3]


def test_ids_outside_the_vocabulary_are_refused_before_the_engine_is_asked() -> None:
    source = RandomSource(vocab_size=50)
    for prompt, stops, found in (([50], [], "50 to 50"), ([1, -1], [], "-1 to 1"), ([1], [99], "99 to 99")):
        with pytest.raises(BatchError, match=f"ids from {found}; expected 0 to 49"):
            asyncio.run(sampler(source).sample(prompt, stop_token_ids=stops))
    with pytest.raises(BatchError, match="token_ids is empty"):
        asyncio.run(sampler(source).sample([]))
    assert not source.prompts


def test_a_generation_that_the_engine_gave_up_ends_the_episode() -> None:
    class Aborting(RandomSource):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
            return generation([3], finish="abort")

    mine = sampler(Aborting())
    assert stop_of(mine, [1]) == "cancelled"
    assert mine.segments == ()
