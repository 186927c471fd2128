"""Batches of episodes: order, staleness, failures, metrics, transcripts and what ends with the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from actors.collect.collector import Collector
from actors.collect.episodes import EpisodeBatch, EpisodeSource, EpisodeStream, play_held_out
from actors.collect.held_out import HeldOutSet
from actors.collect.inputs import EpisodeInputs
from actors.collect.prompts import PromptSource
from actors.collect.sample_metrics import episode_metrics
from actors.collect.transcripts import describe_episodes, transcript
from actors.folder.checkpoints import StreamPosition
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import SamplingConfig
from actors.watch.metrics import Clock
from rl_backend.contracts import ConfigError, EpisodeFailedError, WeightVersionError
from rl_backend.environment import Limits, Result, Sampler, play_episode
from rl_backend.environment.groups import PlayOptions
from rl_backend.options.option_set import filled
from tests.support.token_sources import RandomSource

CLOSED: list[int] = []


async def player(row: Mapping[str, Any], sampler: Sampler) -> Result:
    """Two turns; the reward is the first token's."""
    try:
        first = await sampler.sample([1, row["task"]], max_tokens=3)
        if row.get("fails") and first.token_ids[0] % row["fails"] == 0:
            raise ValueError("no such door")
        if row.get("hangs"):
            await asyncio.Event().wait()
        sampler.reward(first.token_ids[0] / 100)
        if row.get("left_out"):
            sampler.leave_out()
            return Result(stop="done")
        await sampler.sample([1, row["task"], *first.token_ids, 9], max_tokens=2)
        return Result(metrics={"won": float(first.token_ids[0] > 25)}, stop="turns" if row.get("cut") else "done")
    finally:
        CLOSED.append(row["task"])


class Tokens:
    """A tokenizer with a character for each token."""

    def decode(self, token_ids: Any, **_: Any) -> str:
        return "".join(chr(64 + token) for token in token_ids)


def settings(**options: Any) -> EpisodeConfig:
    given = {"model": "nowhere", "dataset": "rows.jsonl", "environment": "m:make", "run_dir": "runs/x"}
    return EpisodeConfig(**{**given, "prompts_per_step": 3, "samples_per_prompt": 4, **options})


def over(stream: EpisodeStream, config: EpisodeConfig, **options: Any) -> Collector[EpisodeBatch]:
    """A collector of what the stream plays, at the first step."""
    tokens: Any = None
    source = EpisodeSource(config, EpisodeInputs(Tokens(), player, None, [], [], iter(())), lambda _: tokens, **options)
    source.stream = stream
    collector = Collector(config, source)
    collector.versions.pushed(1, 0)
    return collector


def collector_of(
    config: EpisodeConfig, source: RandomSource | None = None, start: StreamPosition | None = None, **row: Any
) -> Collector[EpisodeBatch]:
    options = PlayOptions(filled(config, "limits"), config.on_episode_failure, config.least_episodes)
    taken = start.taken if start else 0
    batches = ([{"task": 3 * number + each, **row} for each in range(3)] for number in count(taken))
    size, ahead = config.sampling.n, config.batches_ahead
    source = source or RandomSource(version=1)
    stream = EpisodeStream(player, source, options, batches, n=size, seed=5, ahead=ahead, start=start)
    return over(stream, config)


def comparable(batch: EpisodeBatch) -> list[Any]:
    return [replace(episode, metrics={}) for episode in batch.episodes]


def test_a_batch_has_groups_of_episodes_in_the_order_of_their_rows() -> None:
    batch = collector_of(settings()).collect(1, Clock())
    assert batch.groups == [0] * 4 + [1] * 4 + [2] * 4
    assert [row["task"] for row in batch.rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert batch.rewards == [episode.reward for episode in batch.episodes]
    assert batch.rewards == pytest.approx([episode.turns[0].token_ids[0] / 100 for episode in batch.episodes])
    assert len({episode.turns[0].token_ids for episode in batch.episodes[:4]}) > 1
    assert batch.metrics["turns"] == 2 and batch.metrics["segments"] == 1 and batch.metrics["stop/done"] == 1
    assert 0 < batch.metrics["episode/won"] < 1 and batch.metrics["reward_std"] > 0
    assert 0 <= batch.metrics["environment_share"] <= 1


def test_a_run_that_continues_plays_the_same_episodes() -> None:
    collector = collector_of(settings())
    collector.collect(1, Clock())
    collector.versions.pushed(1, 1)
    second = collector.collect(2, Clock())
    resumed = collector_of(settings(), start=StreamPosition(1))
    resumed.versions.pushed(1, 1)
    again = resumed.collect(2, Clock())
    assert comparable(again) == comparable(second)


@pytest.mark.shows(
    "episodes: one that failed leaves the batch, and with too few left its group; or counts as zero; or stops"
)
def test_what_comes_of_episodes_that_fail() -> None:
    dropped = collector_of(settings(least_episodes=3), fails=3).collect(1, Clock())
    assert dropped.failures and "error after 1 turns: ValueError: no such door" in dropped.failures[0]
    assert all(dropped.groups.count(group) >= 3 for group in dropped.groups)
    assert dropped.metrics["episodes_dropped"] == len(dropped.dropped) == 12 - len(dropped.episodes) > 0
    assert dropped.metrics["groups_dropped"] == 3 - len(set(dropped.groups))
    zero = collector_of(settings(on_episode_failure="zero"), fails=3).collect(1, Clock())
    assert len(zero.episodes) == 12 and "episodes_dropped" not in zero.metrics
    assert {reward for reward, episode in zip(zero.rewards, zero.episodes, strict=True) if episode.stop == "error"} == {0.0}
    assert zero.metrics["stop/error"] == zero.metrics["episodes_failed"] > 0
    with pytest.raises(EpisodeFailedError, match="no such door"):
        collector_of(settings(on_episode_failure="stop"), fails=3).collect(1, Clock())
    with pytest.raises(EpisodeFailedError, match=r"^step 1: no episode of the step has a turn to train on, such as: error"):
        collector_of(settings(), fails=1).collect(1, Clock())


def test_staleness_is_that_of_an_episodes_oldest_token() -> None:
    collector = collector_of(settings(max_staleness=1), RandomSource(version=1))
    for step in range(3):
        collector.versions.pushed(10 + step, step)
    collector.versions.pushed(1, 2)
    batch = collector.collect(3, Clock())
    assert batch.metrics["staleness_max"] == batch.metrics["staleness_mean"] == 0
    collector.versions.pushed(1, 0)
    with pytest.raises(WeightVersionError, match="3 steps old; sampling 1 batches ahead explains fewer"):
        collector.collect(4, Clock())


@pytest.mark.shows("episodes: with truncated=mask a batch that was cut off as a whole is passed over, and the run goes on")
def test_a_batch_whose_episodes_were_all_cut_off_is_passed_over_where_they_are_masked() -> None:
    def collector(cut: int) -> Collector[EpisodeBatch]:
        config = settings(truncated="mask")
        batches = ([{"task": each, "cut": number < cut} for each in range(3)] for number in count())
        stream = EpisodeStream(player, RandomSource(version=1), PlayOptions(), batches, n=4, seed=5, ahead=0)
        return over(stream, config, on_warning=told.append)

    told: list[str] = []
    batch = collector(2).collect(1, Clock())
    assert batch.metrics["batches_cut_off"] == 2 and batch.metrics["stop/done"] == 1
    assert told == ["step 1: every episode was cut off, and truncated='mask' trains on none of them; "
                    "the next batch is played in its place"] * 2  # fmt: skip
    assert collector_of(settings(), cut=True).collect(1, Clock()).metrics["stop/turns"] == 1
    with pytest.raises(
        EpisodeFailedError, match=r"in 10 batches in a row; raise the limits, such as max_turns, or set trunc"
    ):
        collector(10).collect(1, Clock())


def test_episodes_whose_turns_are_all_left_out_have_nothing_to_train_on() -> None:
    with pytest.raises(EpisodeFailedError, match=r"no episode of the step has a turn to train on$"):
        collector_of(settings(), left_out=True).collect(1, Clock())
    told: list[str] = []
    # The first batch has episodes that were cut off, and others without a trained turn.
    batches = (
        [{"task": each, "cut": number == 0, "left_out": number + each == 0} for each in range(3)] for number in count()
    )
    stream = EpisodeStream(player, RandomSource(version=1), PlayOptions(), batches, n=4, seed=5, ahead=0)
    collector = over(stream, settings(truncated="mask"), on_warning=told.append)
    assert collector.collect(1, Clock()).metrics["batches_cut_off"] == 1 and len(told) == 1


def test_shuffled_rewards_are_the_same_rewards_on_other_episodes() -> None:
    plain, shuffled = (collector_of(settings(shuffle_rewards=each)).collect(1, Clock()) for each in (False, True))
    assert sorted(plain.rewards) == pytest.approx(sorted(shuffled.rewards)) and plain.rewards != shuffled.rewards
    for episode in shuffled.episodes:
        assert sum(sum(segment.rewards) for segment in episode.segments) == pytest.approx(episode.reward)


@pytest.mark.shows("episodes: transcripts have turns, rewards and which tokens were trained")
def test_a_transcript_says_what_was_trained() -> None:
    (episode, *_) = collector_of(settings()).collect(1, Clock()).episodes
    (line,) = describe_episodes([episode], Tokens())
    first, second = (Tokens().decode(turn.token_ids) for turn in episode.turns)
    assert line["segments"] == [[["A@", False], [first, True], ["I", False], [second, True]]]
    assert (line["prompt"], line["response"]) == ("A@", f"{first}I{second}")
    assert [turn["text"] for turn in line["turns"]] == [first, second]
    assert line["version_spans"] == [[1, len(first) + len(second)]] and line["stop"] == "done"
    shown = transcript(episode, Tokens())
    assert f"trained tokens in brackets: A@[{first}]I[{second}]" in shown and "ended: done; reward" in shown


def test_held_out_episodes_have_estimates_and_lines() -> None:
    held_out = HeldOutSet("tasks", [{"task": each} for each in range(3)], SamplingConfig(n=2), (1, 2), 0.2)
    results = [play_held_out(held_out, player, RandomSource(version=1), PlayOptions(), seed=1, index=0) for _ in range(2)]
    assert [replace(each, metrics={}) for each in results[0].episodes] == [
        replace(each, metrics={}) for each in results[1].episodes
    ]
    names = [f"eval/tasks/{name}" for name in ("mean@2", "pass@1", "pass@2")]
    assert set(results[0].metrics) == {*names, *(f"{name}_stderr" for name in names)}
    lines = results[0].lines(Tokens())
    assert len(lines) == 6 and lines[0]["set"] == "tasks"
    failing = replace(held_out, prompts=[{"task": 1, "fails": 1}])
    failed = play_held_out(failing, player, RandomSource(version=1), PlayOptions(), seed=1, index=0)
    assert failed.reward == 0 and len(failed.failures) == 2


@pytest.mark.shows("episodes: a call of asyncio.to_thread that hangs holds up neither a step nor a held-out set")
@pytest.mark.parametrize("where", ["step", "held out"])
def test_a_thread_that_hangs_is_left_behind(where: str) -> None:
    release, source = threading.Event(), RandomSource(version=1)

    async def hangs(row: Mapping[str, Any], sampler: Sampler) -> Result:
        turn = await sampler.sample([1, row["task"]], max_tokens=1)
        if turn.token_ids[0] % 2:
            await asyncio.to_thread(release.wait, 60)
        return Result()

    options, rows = PlayOptions(Limits(episode_seconds=0.5), "zero"), [{"task": each} for each in range(4)]
    begun = time.monotonic()
    if where == "step":
        with EpisodeStream(hangs, source, options, iter([rows]), n=2, seed=5, ahead=0) as stream:
            episodes = [each for group in stream.next(more=0).samples for each in group.episodes]
    else:
        held_out = HeldOutSet("tasks", rows, SamplingConfig(n=2), (1,), 0.2)
        episodes = list(play_held_out(held_out, hangs, source, options, seed=1, index=0).episodes)
    assert time.monotonic() - begun < 30
    assert {each.stop for each in episodes} == {"done", "timeout"}
    release.set()


@pytest.mark.shows("episodes: environments are closed when a run ends in the middle of them")
def test_a_run_that_ends_closes_its_environments() -> None:
    config = settings(max_staleness=1)
    source = RandomSource(version=1)
    stream = collector_of(config, source, hangs=True)._source.stream
    stream._begin()
    while len(source.prompts) < 12:
        time.sleep(0.01)
    CLOSED.clear()
    stream.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert len(CLOSED) == 12
    assert stream._playing is None


@pytest.mark.parametrize(("kind", "told"), [(EpisodeSource, "2 episodes"), (PromptSource, "2 calls of reward functions")])
def test_what_failed_is_told_by_its_name(kind: type[Any], told: str) -> None:
    assert kind.failed(None, 2) == told


def test_metrics_of_an_environment_replace_none_of_every_episodes() -> None:
    async def names(row: Mapping[str, Any], sampler: Sampler) -> Result:
        await sampler.sample([1], max_tokens=2)
        return Result(metrics={"turns": 9.0, "seconds": 1e6, "won": 1.0})

    episode = asyncio.run(play_episode(names, {}, RandomSource(), sampling_seed=1, seed=1))
    assert episode.metrics["turns"] == 1 and episode.metrics["seconds"] < 1e5
    metrics = episode_metrics([[episode]])
    assert (metrics["turns"], metrics["episode/turns"], metrics["episode/won"]) == (1, 9.0, 1.0)
    assert 0 <= metrics["environment_share"] <= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"player": "m:player"}, "give either an environment, which is stepped, or a player"),
        ({"environment": None, "player": "m:player", "history": "keep"}, "a player samples by itself; leave it out"),
        (
            {"environment": None, "player": "m:player", "limits": {"step_seconds": 3}},
            r"limits\.step_seconds=3\.0: a player has neither steps nor tools",
        ),
        (
            {"environment": None, "player": "m:player", "limits": {"tool_calls": 3}},
            r"limits\.tool_calls=3: a player has neither steps nor tools",
        ),
        ({"tool_format": "qwen3_coder"}, "input should be 'hermes', 'json' or 'pythonic'"),
        ({"max_prompt_tokens": 8}, "environments make their prompts; set max_episode_tokens"),
        ({"answer_column": "x"}, "an environment is given the row as it stands"),
        ({"max_response_tokens": 64, "max_episode_tokens": 64}, "max_episode_tokens=64 must hold a prompt and a turn"),
        ({"least_episodes": 5}, "a group has samples_per_prompt=4 episodes; use at most that"),
        ({"least_episodes": 3, "on_episode_failure": "zero"}, "only on_episode_failure='drop' leaves episodes out"),
        ({"push_during_episodes": True}, "max_staleness=0 samples nothing ahead"),
        (
            {"limits": {"episode_tokens": None}},
            "EpisodeConfig.max_episode_tokens=None: sequences need a bound to be trained on",
        ),
        ({"max_tokens_per_micro_batch": 100}, "must hold one sequence: max_episode_tokens = 4096"),
        ({"limits": {"turn_tokens": 7}}, "follows from max_response_tokens; set that"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**options)


def test_single_episodes_need_no_number_that_only_groups_have() -> None:
    for on_failure in ("stop", "zero", "drop"):
        config = settings(samples_per_prompt=1, on_episode_failure=on_failure)
        source: Any = EpisodeSource(
            config, EpisodeInputs(Tokens(), player, None, [], [], iter(())), lambda _: RandomSource()
        )
        assert source.play_options(Limits()).fewest == 1
    with pytest.raises(ConfigError, match="a group has samples_per_prompt=1 episodes; use at most that"):
        settings(samples_per_prompt=1, least_episodes=3)


def test_lengths_follow_from_one_another() -> None:
    config = settings(max_response_tokens=64, max_episode_tokens=512, max_turns=3)
    assert (filled(config, "limits").turn_tokens, config.limits.turns) == (64, 3)
    assert (config.longest_sequence, config.rollout.max_model_len) == (512, 512)
    assert "3 x 4 episodes of up to 3 turns a step" in config.facts()


def test_episodes_that_failed_before_their_first_turn_have_no_age() -> None:
    async def refuses_some(row: Mapping[str, Any], sampler: Sampler) -> Result:
        if row["task"] == 0:
            raise ValueError("no such door")
        await sampler.sample([1, row["task"]], max_tokens=2)
        return Result()

    config = settings(max_staleness=1, on_episode_failure="zero")
    options = PlayOptions(filled(config, "limits"), "zero")
    batches = iter([[{"task": each} for each in range(3)]])
    with EpisodeStream(refuses_some, RandomSource(version=1), options, batches, n=4, seed=5, ahead=0) as stream:
        batch = over(stream, config).collect(2, Clock())
    assert [episode.stop for episode in batch.episodes[:5]] == ["error"] * 4 + ["done"]
    assert batch.metrics["staleness_max"] == batch.metrics["staleness_mean"] == 1


def test_the_speed_of_sampling_counts_turns_of_episodes_that_are_dropped() -> None:
    collector = collector_of(settings(least_episodes=1), fails=3)
    draw, seconds = collector._source.stream.next, 0.5
    collector._source.stream.next = lambda more=None: replace(draw(more=0), seconds=seconds)  # type: ignore[method-assign]
    batch = collector.collect(1, Clock())
    sampled = sum(len(turn.token_ids) for episode in (*batch.episodes, *batch.dropped) for turn in episode.turns)
    assert batch.dropped and batch.metrics["tokens_per_second/sample"] == sampled / seconds


def test_rewards_of_episodes_are_shuffled_otherwise_in_every_batch_and_run() -> None:
    def shuffled(number: int, seed: int = 0) -> tuple[float, ...]:
        config = settings(shuffle_rewards=True, seed=seed)
        draft = EpisodeSource(
            config, EpisodeInputs(Tokens(), player, None, [], [], iter(())), lambda _: RandomSource()
        ).draft(1)
        assert draft.add(replace(drawn, number=number), Clock())
        return tuple(draft.finish({}, lambda _: {}).rewards)

    drawn = collector_of(settings())._source.stream.next(more=0)
    assert len({shuffled(1), shuffled(2), shuffled(1, seed=1)}) == 3


def test_every_held_out_set_has_seeds_that_no_step_has() -> None:
    held_out = HeldOutSet("tasks", [{"task": each} for each in range(3)], SamplingConfig(n=2), (1, 2), 0.2)

    def tokens(seed: int, index: int) -> list[Any]:
        result = play_held_out(held_out, player, RandomSource(version=1), PlayOptions(), seed=seed, index=index)
        return [episode.turns[0].token_ids for episode in result.episodes]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(map(tuple, each)) for each in (tokens(1, 0), tokens(1, 1), tokens(2, 0), tokens(2, 1))}) == 4
