from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rl_backend.contracts import BatchError, EpisodeEndError, RolloutError
from rl_backend.environment import Limits, ToolCall
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
    assert dict(mine.metrics()) | {"engine_seconds": 0} == {
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
    with pytest.raises(BatchError, match="token_ids has no ids"):
        asyncio.run(sampler(source).sample([]))
    assert not source.prompts


def test_a_generation_that_the_engine_gave_up_ends_the_episode() -> None:
    class Aborting(RandomSource):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
            return generation([3], finish="abort")

    mine = sampler(Aborting())
    assert stop_of(mine, [1]) == "cancelled"
    assert mine.segments == ()


class Recorded(RandomSource):
    """Keeps what it is asked for, and says that half of the prompt was known."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
        self.asked.append(asked)
        found = await super().generate(token_ids, **asked)
        return replace(found, cached_tokens=len(token_ids) // 2)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"turns": 1}, "limits.turns=1"),
        ({"sampled_tokens": 3}, "limits.sampled_tokens=3"),
        ({"episode_tokens": 20}, "a prompt of 30 tokens leaves no room in limits.episode_tokens=20"),
        ({}, "a prompt of 30 tokens leaves no room in the context of 30 tokens"),
        ({"episode_tokens": 40}, "a prompt of 30 tokens leaves no room in the context of 30 tokens"),
    ],
)
def test_a_limit_says_which_it_is_and_stays_met(limits: dict[str, int], message: str) -> None:
    mine = sampler(RandomSource(context_tokens=30), **limits)
    asyncio.run(mine.sample([1, 2], max_tokens=3))
    for prompt in ([1] * (9 if "sampled_tokens" in limits else 30), [1]):
        with pytest.raises(EpisodeEndError) as ended:
            asyncio.run(mine.sample(prompt))
        assert ended.value.message == message
    assert len(mine.turns) == 1


def test_a_turn_may_have_the_last_token_of_each_limit() -> None:
    mine = sampler(RandomSource(context_tokens=20), episode_tokens=10, sampled_tokens=5, turns=3, turn_tokens=4)
    lengths = [len(asyncio.run(mine.sample([1] * prompt)).token_ids) for prompt in (9, 2)]
    assert lengths == [1, 4]
    with pytest.raises(EpisodeEndError, match=r"limits\.sampled_tokens=5"):
        asyncio.run(mine.sample([1]))
    with pytest.raises(BatchError, match="max_tokens=0: a turn has at least 1 token"):
        asyncio.run(sampler(RandomSource()).sample([1], max_tokens=0))
    tight = sampler(RandomSource(context_tokens=8), episode_tokens=9)
    assert len(asyncio.run(tight.sample([1] * 7)).token_ids) == 1


def test_what_engines_are_asked_and_what_is_kept_of_their_answers() -> None:
    source = Recorded()
    mine = sampler(source)
    first = asyncio.run(mine.sample([1, 2, 3, 4], stop_token_ids=[7], max_tokens=2))
    second = asyncio.run(mine.sample([9] * 7, max_tokens=3))
    assert [(each["seed"], each["max_tokens"]) for each in source.asked] == [(11, 2), (turn_seed(11, 1), 3)]
    assert [list(each["stop_token_ids"]) for each in source.asked] == [[7], []]
    assert (first.prompt_tokens, first.cached_tokens, second.prompt_tokens, second.cached_tokens) == (4, 2, 7, 3)
    calls = [ToolCall("f", {}, status, "") for status in ("ok", "timeout", "unclosed")]
    mine.describe({"role": "assistant", "content": "x"}, calls, [{"role": "user", "content": "y"}])
    mine.reward(0.5)
    mine.reward(2)
    assert mine.turns[0].message is None and mine.turns[1].message == {"role": "assistant", "content": "x"}
    assert mine.turns[1].calls == tuple(calls) and mine.turns[1].given == ({"role": "user", "content": "y"},)
    assert [each.reward for each in mine.turns] == [0.0, 2.5] and mine.calls == 3
    assert [each.rewards[-1] for each in mine.segments] == [0.0, 2.5]
    found = mine.metrics()
    assert found["engine_seconds"] == mine.engine_seconds > 0
    assert {name: value for name, value in found.items() if "seconds" not in name} == {
        "turns": 2, "segments": 2, "sampled_tokens": 5, "prompt_tokens": 11, "cached_tokens": 5, "tool_calls": 3,
        "failed_tool_calls": 2,
    }  # fmt: skip
    assert (mine.seed, mine.sampling_seed) == (3, 11)


def test_an_engine_that_samples_too_much_or_raises_ends_no_episode_by_itself() -> None:
    class Long(RandomSource):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
            if len(self.prompts) == 1:
                await asyncio.sleep(0.01)
                raise OSError("gone")
            found = await super().generate(token_ids, **asked)
            return generation([*found.token_ids, 1])

    mine = sampler(Long())
    with pytest.raises(RolloutError, match="the engine sampled 3 tokens; at most 2 were asked for"):
        asyncio.run(mine.sample([1], max_tokens=2))
    before = mine.engine_seconds
    with pytest.raises(OSError, match="gone"):
        asyncio.run(mine.sample([1], max_tokens=2))
    assert mine.engine_seconds > before + 0.005, "time of a call that raised counts too"
    assert mine.turns == () and mine.segments == ()
    assert mine.end("parse", "why").details["stop"] == "parse"
    with pytest.raises(EpisodeEndError, match=r"^why$"):
        asyncio.run(mine.sample([1]))


def test_ids_at_the_border_of_the_vocabulary() -> None:
    source = RandomSource(vocab_size=50)
    asyncio.run(sampler(source).sample([0, 49], stop_token_ids=[49, 0], max_tokens=1))
    with pytest.raises(BatchError, match="stop_token_ids has ids from -1 to 3; expected 0 to 49: the environment or its"):
        asyncio.run(sampler(source).sample([1], stop_token_ids=[3, -1]))


def test_the_seed_of_a_later_turn_is_the_hash_of_seed_and_turn() -> None:
    import struct

    import xxhash

    for seed, turn in ((11, 1), (2**63 - 1, 300)):
        assert turn_seed(seed, turn) == xxhash.xxh3_64(struct.pack("<Qq", seed, turn)).intdigest() // 2
