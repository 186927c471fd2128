"""``rl-backend schedule --from-trace``: what a pipeline really did in a run, beside what its schedule predicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_backend.cli.errors import CommandError
from rl_backend.cli.picture import Picture
from rl_backend.cli.schedule_chart import draw_schedule
from rl_backend.pipeline.measured import MeasuredPass, median_pass, read_passes
from rl_backend.pipeline.simulate import Timeline
from rl_backend.report.numbers import short

TRACE = "trace.json"


def chosen_pass(run: Path, number: int | None) -> MeasuredPass:
    """The training pass to show: that of median makespan, or the one called ``number``.

    Raises:
        CommandError: no trace, no pipeline in it, or no such pass.
    """
    path = run / TRACE if run.is_dir() else run
    try:
        passes = read_passes(path)
    except OSError as error:
        raise CommandError(f"--from-trace {run}: cannot be read: {error}") from None
    if not passes:
        raise CommandError(
            f"--from-trace {run}: has no complete training pass of a pipeline; traced are runs with --trace whose native "
            "runtime has pp or vpp above 1, or a pipeline_schedule"
        )
    if number is None:
        return median_pass(passes)
    if not 0 <= number < len(passes):
        raise CommandError(f"--pass {number}: the trace has the passes 0 to {len(passes) - 1}")
    return passes[number]


def as_facts(found: MeasuredPass) -> dict[str, Any]:
    """For JSON; times in seconds. A trace has no memory in it: ``peak_activations`` is the schedule's own."""
    schedule = found.schedule
    return {
        "schedule": schedule.name,
        "pp": schedule.pp_size,
        "num_micro_batches": schedule.num_micro_batches,
        "stages_per_rank": schedule.stages_per_rank,
        "model": found.model,
        "peak_activations": list(schedule.peak_activations),
        "measured": times(found.measured),
        "predicted": times(found.predicted),
    }


def as_text(found: MeasuredPass) -> str:
    """The numbers side by side."""
    schedule, facts = found.schedule, as_facts(found)
    lines = [
        f"{schedule.name}: pp={schedule.pp_size}, {schedule.stages_per_rank} stages per rank, "
        f"{schedule.num_micro_batches} micro-batches, model {found.model!r}",
        "predicted: the schedule with the mean times of this pass, and transfers that take none",
        "",
        f"{'':22}{'measured':>12}{'predicted':>12}",
    ]
    for label, key, unit in (
        ("makespan", "makespan", " s"),
        ("bubble of the step", "bubble_makespan", "%"),
        ("bubble inside a rank", "bubble_span", "%"),
    ):
        pair = [facts[side][key] for side in ("measured", "predicted")]
        shown = [f"{value:.1%}" if unit == "%" else f"{short(value)}{unit}" for value in pair]
        lines.append(f"{label:22}{shown[0]:>12}{shown[1]:>12}")
    return "\n".join(lines)


def draw(found: MeasuredPass) -> Picture:
    """Both timelines, one below the other, on one scale."""
    longest = max(found.measured.makespan, found.predicted.makespan)
    pictures = [
        draw_schedule(found.schedule, timeline, f"{name}: {_summary(facts)}", until=longest)
        for name, timeline, facts in (
            ("measured, in seconds", found.measured, times(found.measured)),
            ("predicted from its mean times", found.predicted, times(found.predicted)),
        )
    ]
    return _below_each_other(pictures)


def print_pass(found: MeasuredPass, *, as_json: bool) -> None:
    print(json.dumps(as_facts(found), indent=1) if as_json else as_text(found))


def times(timeline: Timeline) -> dict[str, float]:
    """For JSON."""
    return {
        "makespan": timeline.makespan,
        "bubble_makespan": timeline.bubble_makespan,
        "bubble_span": timeline.bubble_span,
    }


def _summary(facts: Mapping[str, Any]) -> str:
    return (
        f"makespan {short(facts['makespan'])} s; bubble {facts['bubble_makespan']:.1%} of the step, "
        f"{facts['bubble_span']:.1%} inside a rank"
    )


def _below_each_other(pictures: Sequence[Picture]) -> Picture:
    shapes = []
    top = 0.0
    for picture in pictures:
        shapes += [replace(shape, y=shape.y + top) for shape in picture.shapes]
        top += picture.height
    return Picture(max(picture.width for picture in pictures), top, pictures[0].title, shapes)
