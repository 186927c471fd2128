"""Vital signs of a run, and warnings when it learns nothing."""

from __future__ import annotations

from tests.mutations.fault import Fault

_TOLD = "test_a_cause_is_told_once_when_it_has_lasted_and_numbers_near_it_are_not"
_SAMPLES = "test_metrics_of_samples_count_lengths_ends_and_groups_of_equal_rewards"

FAULTS = [
    Fault(
        "warned-at-the-first-sign",
        "actors.watch.health_metrics:HealthWarnings.warnings",
        "if self._lasted[name] >= cause.steps and name not in self._told and not explained:",
        "if self._lasted[name] and name not in self._told and not explained:",
        (_TOLD,),
        "one unlucky step would be called a run that learns nothing",
    ),
    Fault(
        "steps-in-between-do-not-count",
        "actors.watch.health_metrics:HealthWarnings.warnings",
        "self._lasted[name] = self._lasted.get(name, 0) + 1 if shown else 0",
        "self._lasted[name] = self._lasted.get(name, 0) + int(shown)",
        (_TOLD,),
        "a healthy run would be warned after its fifth unlucky step",
    ),
    Fault(
        "told-in-every-step",
        "actors.watch.health_metrics:HealthWarnings.warnings",
        "if self._lasted[name] >= cause.steps and name not in self._told and not explained:",
        "if self._lasted[name] >= cause.steps and not explained:",
        (_TOLD,),
        "one warning would hide all other lines",
    ),
    Fault(
        "consequences-told-beside-their-cause",
        "actors.watch.health_metrics:HealthWarnings.warnings",
        "if self._lasted[name] >= cause.steps and name not in self._told and not explained:",
        "if self._lasted[name] >= cause.steps and name not in self._told:",
        ("test_several_causes_are_several_sentences_and_a_consequence_is_none",),
        "equal rewards would also be told as a zero gradient, with other advice",
    ),
    Fault(
        "equal-groups-warned-of-where-advantages-differ",
        "actors.watch.health_metrics:_without_advantages",
        'metrics[name] == value and metrics.get("zero_advantages", 1.0) == 1',
        "metrics[name] == value",
        (
            "test_equal_rewards_of_groups_are_no_cause_where_advantages_compare_more_than_a_group",
            "test_a_cause_is_told_once_when_it_has_lasted_and_numbers_near_it_are_not",
        ),
        "runs whose advantages compare a whole batch would be told that they learn nothing",
    ),
    Fault(
        "warnings-told-again-after-a-resume",
        "actors.watch.health_metrics:HealthWarnings.__init__",
        'self._told: set[str] = set(earlier.get("told", ())) - self._stopping',
        "self._told: set[str] = set()",
        ("test_what_lasts_and_what_was_told_survive_a_resume",),
        "every resume would warn anew",
    ),
    Fault(
        "a-resumed-run-forgets-what-lasts",
        "actors.run.run:Run.__init__",
        "self._health = HealthWarnings(saved.get(_HEALTH), config.health)",
        "self._health = HealthWarnings(None, config.health)",
        ("test_a_resumed_run_goes_on_counting_what_lasts",),
        "a run that is resumed every few steps would never be warned",
    ),
    Fault(
        "warnings-are-logged-and-not-printed",
        "actors.run.run:Run.end_step",
        "warn(warning, self.label)",
        "pass",
        ("test_a_run_prints_and_logs_warnings_and_measures_speed_and_memory",),
        "nobody who watches a run would see that it learns nothing",
    ),
    Fault(
        "equal-groups-are-those-without-reward",
        "actors.collect.sample_metrics:spread_of_rewards",
        'metrics["equal_groups"] = statistics.fmean(len(set(group)) == 1 for group in compared)',
        'metrics["equal_groups"] = statistics.fmean(not any(group) for group in compared)',
        (_SAMPLES,),
        "groups that are solved teach nothing either",
    ),
    Fault(
        "spread-of-a-sample-of-rewards",
        "actors.collect.sample_metrics:spread_of_rewards",
        "statistics.pstdev(rewards)",
        "statistics.stdev(rewards)",
        (_SAMPLES,),
        "a step with one response would fail, and small steps would have too much spread",
    ),
    Fault(
        "responses-that-ended-count-as-cut-off",
        "actors.collect.sample_metrics:sample_metrics",
        '(sample.finish_reason == "length" for sample in samples),',
        "(bool(sample.finish_reason) for sample in samples),",
        (_SAMPLES,),
        "every run would be told to raise its response length",
    ),
    Fault(
        "unknown-tokens-of-a-step-are-not-counted",
        "actors.run.sampling:Sampling.collect",
        'batch.metrics["unknown_tokens"] = unknown',
        "pass",
        ("test_a_steps_unknown_tokens_are_a_metric",),
        "a run would train on ids that decode to nothing, without a word",
    ),
    Fault(
        "a-limit-stops-no-run",
        "actors.run.run:Run.end_step",
        "if self._health.stop:",
        "if False:",
        ("test_a_run_ends_after_the_step_that_is_beyond_a_limit",),
        "a run that is to stop would train on, from samples of another model",
    ),
    Fault(
        "no-number-is-within-a-limit",
        "actors.watch.health_metrics:limit_causes",
        "return lambda value: not value <= limit  # also of NaN",
        "return lambda value: value > limit",
        ("test_a_step_beyond_a_limit_is_told_once_or_stops_the_run",),
        "a KL of NaN would pass",
    ),
]
