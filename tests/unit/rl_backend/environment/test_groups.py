"""Groups of episodes: which are kept, in which order, what they are scored with, and what is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_backend.contracts import EpisodeEndError, EpisodeFailedError
from rl_backend.data.rewards.worker_pool import TimeLimitError
from rl_backend.environment import Episode, Limits, Result, Sampler
from rl_backend.environment.groups import Group, GroupTask, PlayOptions, play_groups
from rl_backend.environment.playing import ended_by, play_episode, with_reward, without_reward
from rl_backend.environment.protocol import Segment
from tests.support.episodes import episode, segment
from tests.support.token_sources import RandomSource


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    """Fails in the way that its row has for its first token's place among those of the group."""
    turn = await sampler.sample([row["task"]], max_tokens=2)
    how = row["how"].get(sampler.sampling_seed)  # type: ignore[attr-defined]
    if how == "raise":
        raise ValueError(f"no {turn.token_ids}")
    if how in ("timeout", "cancelled", "turns", "error"):
        return Result(reward=9.0, stop=how, error=f"by {how}")
    return Result(reward=float(sampler.sampling_seed), metrics={"seed": sampler.seed})  # type: ignore[attr-defined]


def play(how: Mapping[int, str], seeds: Sequence[int] = (3, 1, 2), **options: Any) -> Group:
    task = GroupTask({"task": 5, "how": how}, seed=8, sampling_seeds=seeds)
    (group,) = asyncio.run(play_groups(player, [task], RandomSource(), PlayOptions(**options)))
    return group


def rewards(episodes: Sequence[Episode]) -> list[tuple[int, float]]:
    return [(each.seed, each.reward) for each in episodes]


@pytest.mark.parametrize("how", ["raise", "timeout", "cancelled", "error"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_failed_episode_is_dropped_or_counts_zero_wherever_it_stands(how: str, place: int) -> None:
    seeds = (3, 1, 2)
    failing, others = seeds[place], [(each, float(each)) for each in seeds if each != seeds[place]]
    dropped = play({failing: how}, on_failure="drop")
    assert rewards(dropped.episodes) == others and rewards(dropped.dropped) == [(failing, 0.0)]
    zero = play({failing: how}, on_failure="zero")
    assert rewards(zero.episodes) == [(each, 0.0 if each == failing else float(each)) for each in seeds]
    assert zero.dropped == () and not any(zero.episodes[place].segments[0].rewards)
    with pytest.raises(
        EpisodeFailedError, match=r"ended with \w+ after 1 turns: .*; correct it, or set on_failure"
    ) as failed:
        play({failing: how})
    assert failed.value.details == {"stop": "error" if how == "raise" else how, "sampling_seed": failing}


@pytest.mark.parametrize(("fewest", "kept"), [(1, 2), (2, 2), (3, 0)])
def test_a_group_that_is_too_small_is_dropped_as_a_whole_in_its_order(fewest: int, kept: int) -> None:
    group = play({1: "raise"}, on_failure="drop", fewest=fewest)
    assert len(group.episodes) == kept and len(group.dropped) == 3 - kept
    if not kept:
        assert rewards(group.dropped) == [(3, 3.0), (1, 0.0), (2, 2.0)]
    whole = play({}, seeds=(3,), on_failure="drop", fewest=2)
    assert rewards(whole.episodes) == [(3, 3.0)] and whole.dropped == (), "nothing failed"
    cut = play({1: "turns"}, on_failure="drop", fewest=3)
    assert rewards(cut.episodes) == [(3, 3.0), (1, 9.0), (2, 2.0)] and not cut.dropped


def test_a_score_is_of_those_that_did_not_fail_each_its_own() -> None:
    seen: list[list[int]] = []

    def score(episodes: Sequence[Episode]) -> list[Any]:
        seen.append([each.seed for each in episodes])
        return [{"score": 10 * each.seed} for each in episodes]

    zero = play({1: "raise"}, on_failure="zero", score=score)
    assert seen == [[3, 2]] and rewards(zero.episodes) == [(3, 33.0), (1, 0.0), (2, 22.0)]
    assert [each.segments[0].rewards[-1] for each in zero.episodes] == [33.0, 0.0, 22.0]
    seen.clear()
    play({1: "raise", 2: "raise", 3: "raise"}, on_failure="zero", score=score)
    assert seen == [], "there is nothing to score"
    for score, problem in (
        (lambda _: [1.0] * 4, "score returned 4 rewards for 3 episodes; expected one"),
        (lambda _: [1.0, "x", 1.0], "score returned 'x'; expected a real number"),
        (lambda episodes: [episodes[0].metrics["won"]], r"score raised KeyError: 'won' \(.*test_groups\.py:\d+\)"),
        (lambda _: None, "score raised TypeError: 'NoneType' object is not iterable"),
    ):
        with pytest.raises(EpisodeFailedError, match=f"^{problem}"):
            play({}, score=score)


def test_each_group_has_its_own_task_and_all_are_told_of() -> None:
    told: list[tuple[int, list[int]]] = []
    tasks = [GroupTask({"task": each, "how": {}}, seed=10 * each, sampling_seeds=(each, each + 7)) for each in (4, 2, 3)]
    source = RandomSource()

    def tell(index: int, group: Group) -> None:
        told.append((index, [each.seed for each in group.episodes]))

    groups = asyncio.run(play_groups(player, tasks, source, on_group=tell))
    assert [[each.seed for each in group.episodes] for group in groups] == [[4, 11], [2, 9], [3, 10]]
    assert [[each.metrics["seed"] for each in group.episodes] for group in groups] == [[40, 40], [20, 20], [30, 30]]
    assert sorted(told) == [(0, [4, 11]), (1, [2, 9]), (2, [3, 10])]
    assert sorted(prompt[0] for prompt in source.prompts) == [2, 2, 3, 3, 4, 4]
    assert asyncio.run(play_groups(player, [], source)) == []


TWO: tuple[Segment, Segment] = (
    segment([("given", [1]), ("sampled", [2, 3])], rewards=[0.5]),
    segment([("given", [4, 5]), ("sampled", [6])], rewards=[2.0]),
)


def test_a_reward_of_the_episode_is_at_its_last_token_and_zero_is_of_all() -> None:
    mine = episode(*TWO)
    more = with_reward(mine, -4.0)
    assert [each.rewards for each in more.segments] == [(0.0, 0.0, 0.5), (0.0, 0.0, -2.0)] or [
        list(each.rewards) for each in more.segments
    ] == [[0.0, 0.0, 0.5], [0.0, 0.0, -2.0]]
    assert more.reward == -1.5 and mine.reward == 2.5 and list(mine.segments[1].rewards) == [0.0, 0.0, 2.0]
    none = without_reward(mine)
    assert none.reward == 0.0 and [list(each.rewards) for each in none.segments] == [[0.0] * 3] * 2
    assert [each.token_ids for each in none.segments] == [each.token_ids for each in mine.segments]
    empty = with_reward(episode(reward=1.0), 2.0)
    assert empty.reward == 3.0 and empty.segments == ()


def test_an_end_by_a_limit_says_which_and_keeps_the_metrics() -> None:
    assert ended_by(EpisodeEndError("why", stop="tokens"), {"a": 1.0}) == Result(0.0, {"a": 1.0}, "tokens", "why")
    assert ended_by(EpisodeEndError("why", stop="turns")) == Result(0.0, {}, "turns", "why")
    assert ended_by(TimeLimitError(), {"a": 1.0}) == Result(
        0.0, {"a": 1.0}, "timeout", "a step took longer than limits.step_seconds"
    )


def test_an_episode_has_the_metrics_of_all_and_of_its_own_by_another_name_where_they_clash() -> None:
    async def mine(row: Any, sampler: Sampler) -> Result:
        await sampler.sample([1, 2], max_tokens=3)
        sampler.reward(0.25)
        await asyncio.sleep(0.05)
        return Result(reward=2.0, metrics={"turns": 77.0, "won": 1.0, "seconds": 5.0}, stop="parse", error="odd")

    played = asyncio.run(play_episode(mine, {}, RandomSource(delay=0.03), sampling_seed=21, seed=4))
    assert (played.reward, played.stop, played.error, played.seed) == (2.25, "parse", "odd", 21)
    assert played.segments[0].rewards[-1] == 2.25 and played.turns[0].reward == 0.25
    found = played.metrics
    assert (found["turns"], found["episode/turns"], found["won"], found["episode/seconds"]) == (1, 77.0, 1.0, 5.0)
    assert found["engine_seconds"] >= 0.03 and found["environment_seconds"] >= 0.05
    assert found["seconds"] == pytest.approx(found["engine_seconds"] + found["environment_seconds"])


@pytest.mark.parametrize("ends", ["itself", "by its limit"])
def test_a_player_that_goes_on_after_the_end_gets_no_turn(ends: str) -> None:
    late: list[str] = []

    async def mine(row: Any, sampler: Sampler) -> Result:
        try:
            await asyncio.sleep(0 if ends == "itself" else 60)
        finally:
            try:
                await sampler.sample([1])
            except EpisodeEndError as end:
                late.append(end.message)
        return Result()

    limits = Limits(episode_seconds=0.05)
    played = asyncio.run(play_episode(mine, {}, RandomSource(), sampling_seed=1, seed=1, limits=limits))
    if ends == "itself":
        assert (played.stop, len(played.turns), late) == ("done", 1, [])
    else:
        assert (played.stop, played.error, late) == (
            "timeout",
            "limits.episode_seconds=0.05",
            ["limits.episode_seconds=0.05"],
        )
