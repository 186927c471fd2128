"""Metrics of several micro-batches and ranks, and the parts of a result."""

from __future__ import annotations

import math

from rl_backend.contracts import ForwardResult, Metric, StepResult, merge_metrics


def test_metrics_of_all_results_are_added_and_none_of_them_is_changed() -> None:
    parts = [
        {"a": Metric(1.0, 2.0), "b": Metric(5.0, 1.0)},
        {"b": Metric(7.0, 3.0)},
        {"c": Metric(0.0, 0.0), "a": Metric(2.0, 6.0), "b": Metric(-1.0, 4.0)},
    ]
    before = [dict(each) for each in parts]
    assert merge_metrics(parts) == {"a": Metric(3.0, 8.0), "b": Metric(11.0, 8.0), "c": Metric(0.0, 0.0)}
    assert parts == before
    assert merge_metrics([]) == {}


def test_a_mean_without_weight_is_no_number() -> None:
    assert math.isnan(Metric(3.0, 0.0).mean) and Metric(3.0, -2.0).mean == -1.5
    assert ForwardResult((), {"a": Metric(3.0, 4.0), "b": Metric(1.0, 2.0)}).means == {"a": 0.75, "b": 0.5}
    assert ForwardResult().loss == 0.0 and isinstance(ForwardResult().loss, float)


def test_a_step_compares_with_results_and_tuples_alone() -> None:
    step = StepResult(False, 2.5, None)
    assert step == (False, 2.5, None) and step != [False, 2.5, None] and step != (False, 2.5)
    assert [step[place] for place in range(3)] == [False, 2.5, None]
