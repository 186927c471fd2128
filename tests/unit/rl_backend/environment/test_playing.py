from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from rl_backend.contracts import ConfigError, EpisodeFailedError, RolloutError
from rl_backend.environment import Episode, Limits, Result, Sampler
from rl_backend.environment.groups import Group, GroupTask, PlayOptions, play_groups
from rl_backend.environment.playing import _played, play_episode
from tests.support.token_sources import RandomSource

CLOSED: list[int] = []


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    """Three turns with a wait behind each, as long as ``row`` and the episode's turns say."""
    prompt = [row["task"] % 50]
    try:
        for turn in range(3):
            sampled = await sampler.sample(prompt, max_tokens=4)
            what = row.get("turns", {}).get(sampled.token_ids)
            if what == "raise":
                sampler.reward(0.5)
                raise ValueError("no such door")
            if what == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(random.Random(f"{sampled.token_ids}").uniform(0, row.get("delay", 0)))
            sampler.reward(turn / 4)
            prompt = [*prompt, *sampled.token_ids, 7]
        return Result(reward=1.0, metrics={"won": 1.0})
    finally:
        CLOSED.append(row["task"])


def tasks(count: int, size: int, **row: Any) -> list[GroupTask]:
    return [
        GroupTask({"task": index, **row}, seed=index, sampling_seeds=[1000 * index + each for each in range(size)])
        for index in range(count)
    ]


def played(tasks: Sequence[GroupTask], source: Any = None, **options: Any) -> list[Group]:
    return asyncio.run(play_groups(player, tasks, source or RandomSource(), PlayOptions(**options)))


def comparable(episode: Episode) -> Episode:
    return replace(episode, metrics={name: value for name, value in episode.metrics.items() if "seconds" not in name})


def first_turns(tasks: Sequence[GroupTask]) -> list[tuple[int, ...]]:
    """By which a player tells episodes of a group apart."""
    return [tuple(each.turns[0].token_ids) for group in played(tasks) for each in group.episodes]


@pytest.mark.shows(
    "environments: of 200 episodes at once, one that hangs and three that raise end alone; the others are as alone"
)
def test_two_hundred_episodes_of_which_four_fail() -> None:
    all_tasks = tasks(25, 8)
    turns = first_turns(all_tasks)
    failing = {turns[3]: "raise", turns[50]: "raise", turns[121]: "raise", turns[199]: "hang"}
    with_failures = [replace(each, row={**each.row, "delay": 0.04, "turns": failing}) for each in all_tasks]
    source = RandomSource(delay=0.001)
    groups = played(with_failures, source, limits=Limits(episode_seconds=3.0), on_failure="drop", fewest=2)
    alone = [
        [
            asyncio.run(play_episode(player, task.row, RandomSource(), sampling_seed=each, seed=task.seed))
            for each in task.sampling_seeds
        ]
        for task in all_tasks
    ]
    dropped = [(each.stop, each.error) for group in groups for each in group.dropped]
    assert [stop for stop, _ in dropped] == ["error", "error", "error", "timeout"]
    assert all("ValueError: no such door" in error for stop, error in dropped if stop == "error")
    assert dropped[-1][1] == "limits.episode_seconds=3"
    assert sum(len(group.episodes) for group in groups) == 196 and source.most_at_once > 100
    for group, single in zip(groups, alone, strict=True):
        whole = {each.seed: comparable(each) for each in single}
        assert group.episodes
        assert all(comparable(each) == whole[each.seed] for each in group.episodes)


def test_an_episode_that_hangs_ends_at_its_limit() -> None:
    async def hangs(row: Mapping[str, Any], sampler: Sampler) -> Result:
        await asyncio.Event().wait()
        raise AssertionError

    async def play() -> Episode:
        playing = play_episode(hangs, {}, RandomSource(), sampling_seed=1, seed=1, limits=Limits(episode_seconds=0.05))
        return await asyncio.wait_for(playing, 5)

    assert asyncio.run(play()).stop == "timeout"


def test_rewards_of_turns_and_of_the_episode_lie_at_their_tokens() -> None:
    ((episode,), _) = [group.episodes for group in played(tasks(2, 1))]
    assert episode.reward == 1.75 and episode.stop == "done" and episode.metrics["won"] == 1.0
    (segment,) = episode.segments
    assert [(place, value) for place, value in enumerate(segment.rewards) if value] == [(9, 0.25), (14, 1.5)]
    assert segment.sampled[9] and segment.sampled[14]


def failing_first(count: int, size: int, failing: int) -> list[GroupTask]:
    """Of the first group so many episodes raise."""
    all_tasks = tasks(count, size)
    raising = dict.fromkeys(first_turns(all_tasks)[:failing], "raise")
    return [replace(each, row={**each.row, "turns": raising}) for each in all_tasks]


@pytest.mark.shows(
    "environments: a failed episode stops the run, counts zero, or leaves its group; a small group leaves whole"
)
def test_what_comes_of_a_failed_episode() -> None:
    three = failing_first(2, 4, failing=1)
    with pytest.raises(EpisodeFailedError, match=r"ended with error after 1 turns: ValueError: no such door .*on_failure"):
        played(three)
    zero = played(three, on_failure="zero")[0]
    assert [each.reward for each in zero.episodes] == [0.0, 1.75, 1.75, 1.75] and not zero.dropped
    assert zero.episodes[0].segments and not any(zero.episodes[0].segments[0].rewards)
    first, second = played(three, on_failure="drop", fewest=3)
    assert (len(first.episodes), len(first.dropped), len(second.episodes)) == (3, 1, 4)
    first, second = played(three, on_failure="drop", fewest=4)
    assert (len(first.episodes), len(first.dropped), len(second.episodes)) == (0, 4, 4)


def test_a_score_of_the_group_is_added_to_those_that_did_not_fail() -> None:
    seen: list[int] = []

    async def score(episodes: Sequence[Episode]) -> list[float]:
        seen.append(len(episodes))
        return [float(index) for index in range(len(episodes))]

    first, second = played(failing_first(2, 3, failing=1), on_failure="zero", score=score)
    assert sorted(seen) == [2, 3]
    assert [each.reward for each in first.episodes] == [0.0, 1.75, 2.75]
    assert [each.segments[0].rewards[-1] for each in second.episodes] == [1.5, 2.5, 3.5]
    with pytest.raises(EpisodeFailedError, match="score returned 1 rewards for 3 episodes"):
        played(tasks(1, 3), score=lambda episodes: [1.0])


def test_a_player_and_a_score_change_what_they_are_given_for_themselves_alone() -> None:
    async def greedy(row: Mapping[str, Any], sampler: Sampler) -> Result:
        await sampler.sample([7])
        return Result(float(row["answers"].pop()), metrics={"left": len(row["answers"])})

    def score(episodes: Sequence[Episode]) -> list[float]:
        for each in episodes:
            each.metrics.clear()  # type: ignore[attr-defined]
        return [0.0] * len(episodes)

    task = GroupTask({"answers": [2, 3]}, seed=1, sampling_seeds=[1, 2, 3])
    (group,) = asyncio.run(play_groups(greedy, [task], RandomSource(), PlayOptions(score=score)))
    assert [(each.reward, each.metrics["left"]) for each in group.episodes] == [(3.0, 1)] * 3
    assert task.row == {"answers": [2, 3]}


def test_no_more_episodes_than_allowed_are_played_at_once() -> None:
    source = RandomSource(delay=0.002)
    played(tasks(5, 4), source, limits=Limits(concurrent=3))
    assert source.most_at_once == 3


def test_groups_are_told_of_as_they_end_and_come_back_in_order() -> None:
    told: list[int] = []
    rows = [replace(each, row={**each.row, "delay": 0.2 if index == 0 else 0}) for index, each in enumerate(tasks(3, 2))]
    groups = asyncio.run(play_groups(player, rows, RandomSource(), on_group=lambda index, group: told.append(index)))
    assert told[-1] == 0 and sorted(told) == [0, 1, 2]
    assert [[each.seed for each in group.episodes] for group in groups] == [list(each.sampling_seeds) for each in rows]


@pytest.mark.parametrize("error", [RolloutError("the engine died"), ConfigError("history=None: choose")])
def test_what_is_no_single_episodes_failure_ends_all_after_they_have_closed(error: Exception) -> None:
    class Failing(RandomSource):
        async def generate(self, token_ids: Sequence[int], **asked: Any) -> Any:
            if token_ids[0] == 3:
                await asyncio.sleep(0.01)
                raise error
            return await super().generate(token_ids, **asked)

    CLOSED.clear()
    with pytest.raises(type(error)):
        played(tasks(5, 1, delay=5.0), Failing(), on_failure="drop")
    assert sorted(CLOSED) == [0, 1, 2, 3, 4]


def test_a_limit_is_no_failure() -> None:
    (group,) = played(tasks(1, 2), limits=Limits(turns=2), on_failure="stop")
    assert [(each.stop, len(each.turns), each.error) for each in group.episodes] == [("turns", 2, "limits.turns=2")] * 2


@pytest.mark.parametrize("whole", [False, True])
def test_a_cancellation_that_is_the_players_own_ends_its_episode_alone(whole: bool) -> None:
    async def cancels(row: Mapping[str, Any], sampler: Sampler) -> Result:
        turn = await sampler.sample([1], max_tokens=1)
        if turn.token_ids[0] % 2:
            return Result(reward=1.0)
        waiting = asyncio.current_task() if whole else asyncio.ensure_future(asyncio.Event().wait())
        assert waiting is not None
        waiting.cancel()
        await asyncio.sleep(0) if whole else await waiting
        raise AssertionError

    (group,) = asyncio.run(play_groups(cancels, tasks(1, 8), RandomSource(), PlayOptions(on_failure="drop")))
    assert len(group.episodes) + len(group.dropped) == 8 and group.episodes and group.dropped
    assert {(each.stop, each.error) for each in group.dropped} == {
        ("error", "CancelledError: what the player waited for was cancelled")
    }


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "returned NoneType; expected a Result"),
        *((Result(reward=float(each)), f"reward of {each}; it must be a finite number") for each in ("nan", "inf", "-inf")),
        *((Result(reward=each), "no number in its reward or its metrics: ") for each in cast(list[Any], [None, [1], "x"])),
        *(
            (Result(metrics=each), "no number in its reward or its metrics: ")
            for each in cast(list[Any], [None, {"a": "x"}])
        ),
    ],
)
def test_a_player_that_returns_no_result_fails(result: Any, problem: str) -> None:
    async def wrong(row: Mapping[str, Any], sampler: Sampler) -> Any:
        return result

    episode = asyncio.run(play_episode(wrong, {}, RandomSource(), sampling_seed=1, seed=1))
    assert episode.stop == "error" and problem in episode.error and episode.segments == ()


def test_what_a_player_changes_within_its_row_is_its_own() -> None:
    row, begun = {"tools": [1]}, list[list[int]]()

    async def player(row: Any, sampler: Sampler) -> Result:
        begun.append([*row["tools"]])
        row["tools"].append(2)
        return Result(reward=1.0)

    for _ in range(2):
        assert asyncio.run(_played(player, row, cast("Any", None))).reward == 1.0
    assert row == {"tools": [1]} and begun == [[1], [1]]
