"""Passes that a trace has, one by one: which are taken, in which order, and the costs that their times say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_backend.pipeline import COMPUTATIONS, Action, Costs, Kind, Schedule, Span, Timeline, make_schedule, simulate
from rl_backend.pipeline.measured import SPAN_NAMES, MeasuredPass, median_pass, read_passes, span_arguments

MICROSECOND = 1e-6


def events_of(
    schedule: Schedule, begin: float, lengths: Mapping[tuple[Kind, int], float], **facts: Any
) -> list[dict[str, Any]]:
    """What ranks write of a pass that begins at ``begin`` microseconds: each computation after all those before it."""
    when, found = begin, []
    costs = Costs(*([lengths[kind, stage] for stage in range(schedule.num_stages)] for kind in (F, B, W)))
    for rank, own in enumerate(simulate(schedule, costs).spans):
        for action, start, end in own:
            arguments = span_arguments(
                action, schedule=schedule, rank=rank, **{"pipeline": 0, "model": "actor", "number": 0, **facts}
            )
            found.append(
                {"ph": "X", "name": SPAN_NAMES[action.kind], "ts": when + start, "dur": end - start, "args": arguments}
            )
    return found


F, B, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
LENGTHS = {(F, 0): 3.0, (F, 1): 5.0, (B, 0): 7.0, (B, 1): 9.0, (W, 0): 11.0, (W, 1): 13.0}


def write(path: Path, events: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return path


def test_a_span_says_where_its_computation_belongs() -> None:
    schedule = make_schedule("zbv", 2, 5)
    found = span_arguments(Action(B, 3, 4), schedule=schedule, pipeline=6, rank=1, model="critic", number=8)
    assert found == {
        "stage": 3,
        "micro_batch": 4,
        "schedule": "zbv",
        "micro_batches": 5,
        "stages": 4,
        "pipeline": 6,
        "pipeline_rank": 1,
        "model": "critic",
        "pass": 8,
    }


def test_passes_come_in_the_order_of_their_times_whatever_their_models_and_numbers(tmp_path: Path) -> None:
    schedule = make_schedule("zb-h1", 2, 3)
    parts = [
        events_of(schedule, 5000.0, LENGTHS, model="actor", number=1),
        events_of(schedule, 9000.0, LENGTHS, model="actor", number=0),
        events_of(schedule, 1000.0, LENGTHS, model="critic", number=1),
        # Pipelines beside it, other events of the same name, and events without arguments.
        events_of(schedule, 100.0, LENGTHS, pipeline=1, number=5),
        [{**event, "ph": "i"} for event in events_of(schedule, 200.0, LENGTHS, number=6)],
        [{**event, "name": "step"} for event in events_of(schedule, 300.0, LENGTHS, number=7)],
        [{"ph": "X", "name": "forward", "ts": 0.0, "dur": 1.0}, {"ph": "M", "name": "process_name"}],
    ]
    # Lines of ranks are mixed.
    events = sorted((event for part in parts for event in part), key=lambda event: json.dumps(event))
    passes = read_passes(write(tmp_path / "trace.json", events))
    assert [(one.model, one.number) for one in passes] == [("critic", 1), ("actor", 1), ("actor", 0)]
    assert all(one.schedule == schedule for one in passes)
    first = passes[0].measured.spans
    assert first[0][0].start == 0.0
    assert [[span.action for span in own] for own in first] == [
        [action for action in own if action.kind in COMPUTATIONS] for own in schedule.actions
    ]
    # In seconds, of which a microsecond is the unit in the trace.
    assert first[0][0].end == pytest.approx(3 * MICROSECOND)
    assert first[1][0] == Span(Action(F, 1, 0), pytest.approx(3 * MICROSECOND), pytest.approx(8 * MICROSECOND))
    assert passes[0].measured.peak_activations == schedule.peak_activations


@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_a_prediction_has_the_mean_time_of_each_kind_in_each_stage(tmp_path: Path, name: str) -> None:
    schedule = make_schedule(name, 2, 3)
    events = events_of(schedule, 0.0, LENGTHS)
    # One pass of each stage takes three times as long as it should, while nothing else starts: on paper only.
    for event in events:
        if event["args"]["micro_batch"] == 1:
            event["dur"] *= 3
    (found,) = read_passes(write(tmp_path / "trace.json", events))
    mean = 5 / 3 * MICROSECOND
    spans = {span.action: span.end - span.start for own in found.predicted.spans for span in own}
    for action, time in spans.items():
        kinds = (B, W) if action.kind is Kind.BACKWARD else (action.kind,)
        expected = sum(LENGTHS[kind, action.stage] for kind in kinds) * mean
        assert time == pytest.approx(expected), action
    assert found.predicted.peak_activations == schedule.peak_activations


def test_a_computation_of_no_time_counts_as_a_microsecond(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", 2, 1)
    events = events_of(schedule, 0.0, LENGTHS)
    for event in events:
        event["dur"] = 0.0
    (found,) = read_passes(write(tmp_path / "trace.json", events))
    assert found.predicted.makespan == pytest.approx(6 * MICROSECOND)


def edited(events: Sequence[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    return [{**event, "args": {**event["args"], **changes}} for event in events]


def test_what_cannot_be_a_whole_training_pass_is_left_out(tmp_path: Path) -> None:
    schedule = make_schedule("zb-h1", 2, 3)
    whole = events_of(schedule, 0.0, LENGTHS)
    forward_only = events_of(make_schedule("zb-h1", 2, 3, forward_only=True), 0.0, LENGTHS)
    left_out: dict[str, Sequence[dict[str, Any]]] = {
        "no backward pass": forward_only,
        "a rank is missing": [event for event in whole if event["args"]["pipeline_rank"] == 0],
        "the first rank is missing": [event for event in whole if event["args"]["pipeline_rank"] == 1],
        "stages of more ranks": edited(whole, stages=3),
        "fewer micro-batches": edited(whole, micro_batches=2),
        "more micro-batches": edited(whole, micro_batches=4),
        "another schedule": edited(whole, schedule="1f1b"),
        "a schedule that is not known": edited(whole, schedule="gpipe"),
        "a schedule of more stages": edited(whole, schedule="zbv"),
        "a computation is missing": whole[:-1],
        "a computation is there twice": [*whole, whole[-1]],
    }
    path = tmp_path / "trace.json"
    for why, events in left_out.items():
        assert read_passes(write(path, events)) == [], why
    beside = [event for number, events in enumerate(left_out.values()) for event in edited(events, **{"pass": number + 1})]
    assert [one.number for one in read_passes(write(path, [*beside, *whole]))] == [0]


def test_the_median_pass_is_one_of_them() -> None:
    def one(number: int, makespan: float) -> MeasuredPass:
        timeline = Timeline(((Span(Action(F, 0, 0), 1.0, 1.0 + makespan),),), (1,))
        empty: Any = None
        return MeasuredPass("actor", number, empty, timeline, empty)

    assert median_pass([one(0, 9.0), one(1, 2.0), one(2, 5.0)]).number == 2
    assert median_pass([one(0, 9.0), one(1, 2.0), one(2, 5.0), one(3, 4.0)]).number == 3
    assert median_pass([one(7, 3.0)]).number == 7


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_a_pass_has_as_many_stages_on_a_rank_as_it_says(tmp_path: Path, stages_per_rank: int) -> None:
    schedule = make_schedule("interleaved-1f1b", 2, 4, stages_per_rank=stages_per_rank)
    lengths = {(kind, stage): 2.0 for kind in (F, B, W) for stage in range(schedule.num_stages)}
    (found,) = read_passes(write(tmp_path / "trace.json", events_of(schedule, 0.0, lengths)))
    assert found.schedule.num_stages == 2 * stages_per_rank and found.schedule.actions == schedule.actions
