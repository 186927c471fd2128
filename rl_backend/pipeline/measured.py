"""Measured pipelines, from the spans of their computations in a trace."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.pipeline.catalog import make_schedule
from rl_backend.pipeline.schedule import COMPUTATIONS, Action, Kind, Schedule
from rl_backend.pipeline.simulate import Costs, Span, Timeline, simulate
from rl_backend.trace.chrome import read_trace

SPAN_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
}
_KINDS = {name: kind for kind, name in SPAN_NAMES.items()}
_MICROSECOND = 1e-6


def span_arguments(
    action: Action, *, schedule: Schedule, pipeline: int, rank: int, model: str, number: int
) -> dict[str, int | str]:
    """What a span says of a computation, for :func:`read_passes`.

    Args:
        pipeline: which of the pipelines beside each other; ``rank`` is the place in it.
        number: of the pass among those of ``model``, the same on all ranks.
    """
    return {
        "stage": action.stage,
        "micro_batch": action.micro_batch,
        "schedule": schedule.name,
        "micro_batches": schedule.num_micro_batches,
        "stages": schedule.num_stages,
        "pipeline": pipeline,
        "pipeline_rank": rank,
        "model": model,
        "pass": number,
    }


@dataclass(frozen=True)
class MeasuredPass:
    """One training pass of one pipeline; times are seconds from its first computation.

    Attributes:
        predicted: the same schedule simulated with the mean times of this pass's computations and transfers for nothing.
    """

    model: str
    number: int
    schedule: Schedule
    measured: Timeline
    predicted: Timeline


def read_passes(path: Path) -> list[MeasuredPass]:
    """The complete training passes of the first pipeline in a trace, in their order.

    Passes of which a rank's spans are missing, as at both ends of a trace that was cut, are left out, and so are passes
    without a backward pass. Raises ``OSError`` for a trace that cannot be read.
    """
    passes: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in read_trace(path):
        facts = event.get("args", {})
        if event.get("ph") == "X" and event.get("name") in _KINDS and facts.get("pipeline") == 0:
            passes[facts["model"], facts["pass"]].append(dict(event))
    ordered = sorted(passes.items(), key=lambda one: min(event["ts"] for event in one[1]))
    found = (_read_pass(model, number, events) for (model, number), events in ordered)
    return [one for one in found if one is not None]


def median_pass(passes: Sequence[MeasuredPass]) -> MeasuredPass:
    """The pass of median makespan; of at least one."""
    middle = statistics.median_low(one.measured.makespan for one in passes)
    return next(one for one in passes if one.measured.makespan == middle)


def _read_pass(model: str, number: int, events: Sequence[Mapping[str, Any]]) -> MeasuredPass | None:
    facts = events[0]["args"]
    by_rank: dict[int, list[Span]] = defaultdict(list)
    begin = min(event["ts"] for event in events)
    for event in sorted(events, key=lambda event: event["ts"]):
        arguments = event["args"]
        start = (event["ts"] - begin) * _MICROSECOND
        action = Action(_KINDS[event["name"]], arguments["stage"], arguments["micro_batch"])
        by_rank[arguments["pipeline_rank"]].append(Span(action, start, start + event["dur"] * _MICROSECOND))
    spans = tuple(tuple(by_rank[rank]) for rank in range(len(by_rank)))
    if facts["stages"] % len(spans) or all(event["name"] == SPAN_NAMES[Kind.FORWARD] for event in events):
        return None
    try:
        schedule = make_schedule(
            facts["schedule"], len(spans), facts["micro_batches"], stages_per_rank=facts["stages"] // len(spans)
        )
    except (BatchError, ConfigError):
        return None  # So few ranks are there that the schedule could not be theirs.
    planned = [[action for action in own if action.kind in COMPUTATIONS] for own in schedule.actions]
    if [[span.action for span in own] for own in spans] != planned:
        return None
    return MeasuredPass(
        model=model,
        number=number,
        schedule=schedule,
        measured=Timeline(spans, schedule.peak_activations),
        predicted=simulate(schedule, _mean_costs(spans, schedule.num_stages)),
    )


def _mean_costs(spans: Sequence[Sequence[Span]], num_stages: int) -> Costs:
    """Of a full backward pass, where a stage has no other, a half is the inputs' and a half the weights'."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for own in spans:
        for (kind, stage, _), start, end in own:
            times[kind, stage].append(end - start)

    def mean(kind: Kind, stage: int) -> float:
        found = times.get((kind, stage))
        if found is None:
            found = [time / 2 for time in times[Kind.BACKWARD, stage]]
        return max(statistics.fmean(found), _MICROSECOND)

    forward, inputs, weights = (
        [mean(kind, stage) for stage in range(num_stages)]
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    return Costs(forward, inputs, weights)
