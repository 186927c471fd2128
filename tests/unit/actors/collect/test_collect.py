"""Batches of a training step: staleness bounds, and groups that carry a signal."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors import Sample, SamplingConfig
from actors.collect.collector import Collector
from actors.collect.inputs import Inputs
from actors.collect.prompts import PromptSource, TrainingBatch
from actors.collect.stream import SampledBatch
from actors.options.sampled_config import RLConfig
from actors.rollout.messages import VersionSpan
from actors.watch.metrics import Clock
from rl_backend.contracts import RewardError, WeightVersionError
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import LoadedReward, RewardScorer

GOOD, BAD, WRONG = [1], [0], [7]


class Tokens:
    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return str(token_ids[0])


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None) -> float:
    return float(solution_str)


class Stream:
    """Batches that are made beforehand."""

    def __init__(self, *batches: SampledBatch) -> None:
        self.batches = list(batches)

    def next(self, more: int | None = None) -> SampledBatch:
        return self.batches.pop(0)

    def __exit__(self, *_: object) -> None: ...


def make_batch(number: int, version: int, *groups: Sequence[Sequence[int]]) -> SampledBatch:
    prompts, samples = [], []
    for index, group in enumerate(groups):
        for place, response in enumerate(group):
            prompts.append(Prompt(PromptExample("p", "1", "made"), [number]))
            span = VersionSpan(version, len(response))
            samples.append(Sample(index, place, [number], list(response), [0.0], "stop", (span,), 0))
    return SampledBatch(number, prompts, samples)


def settings(**changes: Any) -> RLConfig:
    values = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_response_tokens": 4, **changes}
    return RLConfig(model="m", dataset="d", reward="r", run_dir="x", steps=10, **values)


def inputs_for(config: RLConfig, function: Any = reward, **options: Any) -> Inputs:
    scorer = RewardScorer([LoadedReward(function, "m:f")], on_failure=config.rewards.on_failure, **options)
    return Inputs(Tokens(), scorer, [], [], iter(()), SamplingConfig())


def source_of(
    config: RLConfig, *batches: SampledBatch, with_signal: int | None = None, inputs: Inputs | None = None
) -> PromptSource:
    rollout: Any = None
    source = PromptSource(config, inputs or inputs_for(config), rollout, batches_with_signal=with_signal)
    source.stream = Stream(*batches)  # type: ignore[assignment]
    return source


def collector_of(config: RLConfig, *batches: SampledBatch, **options: Any) -> Collector[TrainingBatch]:
    collector = Collector(config, source_of(config, *batches, **options))
    for step in range(4):
        collector.versions.pushed(10 * step, step)
    return collector


def numbers(batch: TrainingBatch) -> list[int]:
    return [sample.prompt_ids[0] for sample in batch.samples]


def test_a_batch_is_scored_and_keeps_its_order() -> None:
    batch = collector_of(settings(), make_batch(1, 0, [GOOD, BAD], [BAD, BAD])).collect(1, Clock())
    assert batch.rewards == [1.0, 0.0, 0.0, 0.0]
    assert (batch.metrics["reward"], batch.metrics["equal_groups"], batch.metrics["response_tokens"]) == (0.25, 0.5, 1.0)
    assert "tokens_per_second/sample" not in batch.metrics, "samples of an earlier process"


def test_the_speed_of_sampling_is_that_of_the_engines_and_counts_samples_that_are_dropped() -> None:
    config = settings(max_staleness=1, sample_ahead=2)
    old = replace(make_batch(1, 10, [GOOD, BAD], [BAD, BAD]), seconds=0.5)
    fresh = replace(make_batch(2, 20, [GOOD, BAD], [BAD, [0, 0, 0]]), seconds=1.5)
    batch = collector_of(config, old, fresh).collect(4, Clock())
    assert batch.metrics["samples_dropped"] == 4
    assert batch.metrics["tokens_per_second/sample"] == (4 + 6) / 2.0


def test_staleness_is_counted_in_training_steps_and_not_in_weight_versions() -> None:
    config = settings(max_staleness=2)
    batch = collector_of(config, make_batch(1, 10, [GOOD, BAD], [BAD, BAD])).collect(4, Clock())
    assert batch.metrics["staleness_max"] == 2
    assert batch.metrics["staleness_mean"] == 2
    assert batch.metrics["samples_dropped"] == 0


def test_a_sample_of_several_versions_is_as_old_as_its_oldest_token() -> None:
    batch = make_batch(1, 30, [GOOD, BAD], [BAD, BAD])
    spans = (VersionSpan(10, 1), VersionSpan(30, 1))
    mixed = [replace(sample, response_ids=[1, 1], version_spans=spans) for sample in batch.samples]
    found = collector_of(settings(max_staleness=2), replace(batch, samples=mixed)).collect(4, Clock())
    assert found.metrics["staleness_max"] == found.metrics["staleness_mean"] == 2


@pytest.mark.shows("runs: one sample that is older than max_staleness leaves the whole batch out, whatever the others are")
@pytest.mark.parametrize("versions", [(10, 30, 30, 30), (30, 30, 30, 10), (20, 10, 30, 20)])
def test_a_batch_is_as_old_as_its_oldest_sample(versions: Sequence[int]) -> None:
    mixed, fresh = (make_batch(number, 30, [GOOD, BAD], [BAD, BAD]) for number in (1, 2))
    samples = [
        replace(sample, version_spans=(VersionSpan(version, 1),))
        for sample, version in zip(mixed.samples, versions, strict=True)
    ]
    mixed = replace(mixed, samples=samples)
    dropped = collector_of(settings(max_staleness=1, sample_ahead=2), mixed, fresh).collect(4, Clock())
    assert numbers(dropped) == [2] * 4 and dropped.metrics["samples_dropped"] == 4
    for options in ({"max_staleness": 2}, {"max_staleness": 1, "sample_ahead": 2, "stale_samples": "correct"}):
        kept = collector_of(settings(**options), mixed, fresh).collect(4, Clock())
        ages = [3 - version // 10 for version in versions]
        assert numbers(kept) == [1] * 4 and kept.metrics["samples_dropped"] == 0
        assert (kept.metrics["staleness_max"], kept.metrics["staleness_mean"]) == (max(ages), sum(ages) / 4)


def test_a_run_that_goes_on_knows_the_weights_of_samples_drawn_before() -> None:
    config = settings(max_staleness=1, sample_ahead=2)
    batch = make_batch(1, 20, [GOOD, BAD], [BAD, BAD])
    state = collector_of(config).versions.state
    assert state == {"step_of_version": [[10, 1], [20, 2], [30, 3]]}
    collector = Collector(config, source_of(config, batch), earlier=state)
    collector.versions.pushed(30, 3)
    assert collector.collect(4, Clock()).metrics["staleness_max"] == 1


def test_samples_that_are_too_old_are_left_out() -> None:
    config = settings(max_staleness=1, sample_ahead=2)
    old, fresh = make_batch(1, 10, [GOOD, BAD], [BAD, BAD]), make_batch(2, 20, [GOOD, BAD], [BAD, BAD])
    batch = collector_of(config, old, fresh).collect(4, Clock())
    assert numbers(batch) == [2, 2, 2, 2]
    assert batch.metrics["samples_dropped"] == 4
    assert batch.metrics["staleness_max"] == 1


def test_samples_that_are_too_old_are_kept_where_they_are_to_be_corrected() -> None:
    config = settings(max_staleness=1, sample_ahead=2, stale_samples="correct")
    batch = collector_of(config, make_batch(1, 10, [GOOD, BAD], [BAD, BAD])).collect(4, Clock())
    assert numbers(batch) == [1, 1, 1, 1]
    assert batch.metrics["staleness_max"] == 2
    assert config.importance_options() == {"tis_cap": 2.0}


def test_weights_older_than_sampling_ahead_explains_are_an_error() -> None:
    with pytest.raises(WeightVersionError, match="2 steps old"):
        collector_of(settings(), make_batch(1, 10, [GOOD, BAD], [BAD, BAD])).collect(4, Clock())


def test_dynamic_sampling_replaces_groups_of_equal_rewards() -> None:
    first = make_batch(1, 0, [GOOD, GOOD], [GOOD, BAD])
    second = make_batch(2, 0, [BAD, BAD], [BAD, GOOD])
    batch = collector_of(settings(), first, second, with_signal=4).collect(1, Clock())
    assert numbers(batch) == [1, 1, 2, 2]
    assert batch.rewards == [1.0, 0.0, 0.0, 1.0]
    assert batch.metrics["batches_sampled"] == 2
    assert batch.metrics["groups_without_signal"] == 2
    assert batch.metrics["reward"] == 0.5


def test_dynamic_sampling_fills_up_when_it_may_sample_no_more() -> None:
    equal = [GOOD, GOOD]
    batches = make_batch(1, 0, equal, equal), make_batch(2, 0, equal, [GOOD, BAD])
    batch = collector_of(settings(), *batches, with_signal=2).collect(1, Clock())
    assert sorted(numbers(batch)) == [1, 1, 2, 2]
    assert sorted(batch.rewards) == [0.0, 1.0, 1.0, 1.0]


def test_shuffled_rewards_are_the_same_rewards_on_other_samples() -> None:
    config = settings(shuffle_rewards=True, prompts_per_step=4)
    groups = [[GOOD, BAD], [GOOD, GOOD], [BAD, BAD], [GOOD, BAD]]
    runs = [collector_of(config, make_batch(1, 0, *groups)).collect(1, Clock()).rewards for _ in range(2)]
    assert runs[0] == runs[1]
    assert sorted(runs[0]) == [0.0] * 4 + [1.0] * 4
    assert runs[0] != [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def picky(solution_str: str, **_: Any) -> dict[str, Any]:
    if solution_str == "7":
        raise ValueError("no sevens")
    return {"score": float(solution_str), "format": 1.0 - float(solution_str), "said": solution_str}


@pytest.mark.shows("rewards: a group whose reward failed leaves the batch with on_reward_failure=drop, and is counted")
def test_a_group_whose_reward_failed_leaves_the_batch() -> None:
    config = settings(prompts_per_step=3, on_reward_failure="drop")
    inputs = inputs_for(config, picky)
    batch = make_batch(1, 0, [GOOD, BAD], [GOOD, WRONG], [BAD, GOOD])
    found = collector_of(config, batch, inputs=inputs).collect(1, Clock())
    assert found.rewards == [1.0, 0.0, 0.0, 1.0]
    assert [sample.prompt_index for sample in found.samples] == [0, 0, 2, 2]
    assert found.metrics["reward"] == found.metrics["reward/format"] == 0.5
    assert (found.metrics["reward_failures"], found.metrics["groups_dropped"]) == (1, 1)
    assert "raised ValueError: no sevens" in found.failures[0]
    with pytest.raises(RewardError, match=r"^step 1: a reward function failed for every prompt of the step, such as: "):
        collector_of(config, make_batch(2, 0, *[[WRONG, GOOD]] * 3), inputs=inputs).collect(1, Clock())


def test_a_call_that_failed_counts_zero_in_its_group() -> None:
    config = settings(on_reward_failure="zero")
    batch = make_batch(1, 0, [GOOD, BAD], [GOOD, WRONG])
    found = collector_of(config, batch, inputs=inputs_for(config, picky)).collect(1, Clock())
    assert found.rewards == [1.0, 0.0, 1.0, 0.0]
    assert found.metrics["reward_failures"] == 1 and "groups_dropped" not in found.metrics
    assert [bool(score.failures) for score in found.scores] == [False, False, False, True]


def test_dynamic_sampling_replaces_groups_whose_reward_failed() -> None:
    config = settings(on_reward_failure="drop")
    batches = make_batch(1, 0, [WRONG, BAD], [GOOD, BAD]), make_batch(2, 0, [BAD, GOOD], [GOOD, GOOD])
    found = collector_of(config, *batches, with_signal=4, inputs=inputs_for(config, picky)).collect(1, Clock())
    assert numbers(found) == [1, 1, 2, 2]
    assert found.metrics["batches_sampled"] == 2 and found.metrics["groups_dropped"] == 1


@pytest.mark.shows("rewards: batches that are sampled ahead are scored while others are sampled and trained on")
def test_scoring_that_has_ended_is_not_begun_again_by_a_batch_that_was_in_flight() -> None:
    asked: list[str] = []

    def function(solution_str: str, **_: Any) -> float:
        asked.append(solution_str)
        return 0.0

    inputs = inputs_for(settings(), function, workers=2)
    source = source_of(settings(), inputs=inputs)
    source.__exit__(KeyError, KeyError(), None)
    source.begin_scoring(make_batch(1, 0, [GOOD, BAD], [BAD, BAD]))
    with inputs.reward:
        assert inputs.reward._opened is None and not asked


def test_a_batch_is_scored_once_from_when_it_is_sampled() -> None:
    begun = threading.Event()
    asked = []

    def function(solution_str: str, **_: Any) -> float:
        asked.append(solution_str)
        begun.set()
        return float(solution_str)

    config = settings(max_staleness=1)
    batch = make_batch(1, 0, [GOOD, BAD], [BAD, BAD])
    with inputs_for(config, function, workers=2).reward as scorer:
        inputs = Inputs(Tokens(), scorer, [], [], iter(()), SamplingConfig())
        source = source_of(config, batch, inputs=inputs)
        source.begin_scoring(batch)
        assert begun.wait(timeout=60)
        collector = Collector(config, source)
        collector.versions.pushed(0, 0)
        assert collector.collect(1, Clock()).rewards == [1.0, 0.0, 0.0, 0.0]
    assert sorted(asked) == ["0", "0", "0", "1"]


def test_dynamic_sampling_takes_no_more_groups_than_a_step_has_and_measures_all_that_were_sampled() -> None:
    first = make_batch(1, 0, [GOOD, GOOD], [GOOD, BAD])
    second = make_batch(2, 0, [BAD, [1, 0, 0]], [GOOD, BAD])
    batch = collector_of(settings(), first, second, with_signal=4).collect(1, Clock())
    assert (numbers(batch), batch.rewards) == ([1, 1, 2, 2], [1.0, 0.0, 0.0, 1.0])
    assert (batch.metrics["reward"], batch.metrics["response_tokens"]) == (5 / 8, 10 / 8)
    assert (batch.metrics["batches_sampled"], batch.metrics["groups_without_signal"]) == (2, 1)


def test_groups_that_fill_a_step_up_are_spread_over_it() -> None:
    signal, equal = [GOOD, BAD], [BAD, BAD]

    def order(step: int, seed: int = 0) -> list[float]:
        config = settings(prompts_per_step=12, seed=seed)
        made = make_batch(1, 10 * step - 10, *[signal] * 6, *[equal] * 6)
        return collector_of(config, made, with_signal=1).collect(step, Clock()).rewards[::2]

    assert sorted(order(1)) == [0.0] * 6 + [1.0] * 6 and order(1) == order(1)
    assert len({tuple(each) for each in (order(1), order(2), order(1, seed=1), [1.0] * 6 + [0.0] * 6)}) == 4


def test_rewards_are_shuffled_otherwise_in_every_batch_and_run() -> None:
    def order(number: int, seed: int = 0) -> tuple[float, ...]:
        config = settings(shuffle_rewards=True, prompts_per_step=12, seed=seed)
        made = make_batch(number, 0, *[[GOOD, GOOD]] * 6, *[[BAD, BAD]] * 6)
        return tuple(collector_of(config, made).collect(1, Clock()).rewards)

    assert len({order(1), order(2), order(1, seed=1)}) == 3


def test_calls_that_failed_are_a_share_of_the_answers_and_at_most_all_of_them() -> None:
    def refuses(**_: Any) -> float:
        raise ValueError("no")

    config = settings(on_reward_failure="zero")
    one = collector_of(config, make_batch(1, 0, [GOOD, BAD], [GOOD, WRONG]), inputs=inputs_for(config, picky))
    assert one.collect(1, Clock()).metrics["rewards_failed"] == 0.25
    scorer = RewardScorer(
        [LoadedReward(refuses, "m:a", "a"), LoadedReward(refuses, "m:b", "b")], on_failure=config.rewards.on_failure
    )
    inputs = replace(inputs_for(config), reward=scorer)
    both = collector_of(config, make_batch(1, 0, [GOOD, BAD], [BAD, BAD]), inputs=inputs).collect(1, Clock())
    assert (both.metrics["reward_failures"], both.metrics["rewards_failed"]) == (8, 1)


def test_scores_of_a_batch_that_is_too_old_are_given_up() -> None:
    config = settings(max_staleness=1, sample_ahead=2)
    old, fresh = make_batch(1, 10, [GOOD, BAD], [BAD, BAD]), make_batch(2, 20, [GOOD, BAD], [BAD, BAD])
    collector = collector_of(config, old, fresh)
    source: Any = collector._source
    given_up: list[int] = []
    source._scoring[1] = SimpleNamespace(cancel=lambda: given_up.append(1))
    assert numbers(collector.collect(4, Clock())) == [2] * 4
    assert given_up == [1] and source._scoring == {}
