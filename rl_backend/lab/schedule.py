"""Pipeline schedules, and a traced run's pipeline beside the prediction of its schedule, as text and pictures."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from rl_backend.lab.picture import Picture, Rectangle, Text, linear_axis
from rl_backend.lab.text import count, short, table
from rl_backend.pipeline import Kind, Schedule, Span, Timeline
from rl_backend.pipeline.measured import MeasuredPass

LEFT, RIGHT, TOP, BOTTOM = 64, 78, 76, 30
LANE, STRIP, GAP = 24, 16, 10
NARROWEST, MIDDLING, WIDEST, PER_COMPUTATION = 760, 1200, 2400, 22
LEGEND = 57
CHARACTER = 6.6  # width of a digit of a label

INK, QUIET, WHITE = "#1c2330", "#5b6675", "#ffffff"
LANE_FILL, STRIP_FILL, GRID = "#eef1f5", "#98a3b3", "#d5dbe3"

KINDS = {
    Kind.FORWARD: ("forward", "#2463b4", "#9cc3f0"),
    Kind.BACKWARD: ("backward", "#a3480b", "#f5b98a"),
    Kind.BACKWARD_INPUT: ("backward for inputs", "#d97706", "#fbd38d"),
    Kind.BACKWARD_WEIGHT: ("backward for weights", "#178a63", "#9fdcc3"),
}
"""Name, and colours of a rank's first stage and of its other ones."""


def schedule_facts(
    schedule: Schedule, timeline: Timeline, costs: tuple[float, float, float], communication: float
) -> dict[str, Any]:
    """For JSON; ``costs`` are those of a micro-batch on all of a rank's stages."""
    return {
        **_shape(schedule),
        "forward_only": schedule.forward_only,
        "costs": {**dict(zip(("forward", "backward_input", "backward_weight"), costs, strict=True)), "comm": communication},
        **_times(timeline),
        "peak_activations": list(timeline.peak_activations),
        "placement": list(schedule.placement),
        "actions": [[str(action) for action in own] for own in schedule.actions],
    }


def schedule_text(schedule: Schedule, timeline: Timeline, facts: dict[str, Any]) -> str:
    lines = [
        f"{schedule.name}: {count(schedule.pp_size, 'rank')} with {count(schedule.stages_per_rank, 'stage')} each, "
        f"{count(schedule.num_micro_batches, 'micro-batch')}{', forward passes alone' if schedule.forward_only else ''}",
        schedule_summary(facts),
        "",
    ]
    rows = [("rank", "stages", "start", "end", "idle inside", "peak activations")]
    for rank, (spans, busy) in enumerate(zip(timeline.spans, timeline.busy, strict=True)):
        start, end = spans[0].start, spans[-1].end
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        idle = f"{max(0.0, 1 - busy / (end - start)):.1%}"
        peak = f"{timeline.peak_activations[rank]:>16}"
        if schedule.stages_per_rank > 1:
            peak += f" = {short(timeline.peak_activations[rank] / schedule.stages_per_rank)} micro-batches"
        rows.append((str(rank), stages, short(start), short(end), idle, peak))
    return "\n".join([*lines, *table("{:>4}  {:10}  {:>7}  {:>8}  {:>11}  {}", rows)])


def comparison_text(schedules: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each schedule: its :func:`schedule_facts`, or the ``error`` that says why it cannot be had."""
    columns = "{:16}  {:>8}  {:>18}  {:>13}  {:>16}"
    titles = ("", "makespan", "bubble of the step", "inside a rank", "peak activations of a rank's layers")
    lines = table(columns, [titles])
    for name, facts in schedules.items():
        if "error" in facts:
            lines.append(f"{name:16}  {facts['error']}")
            continue
        peak = short(max(facts["peak_activations"]) / facts["stages_per_rank"])
        bubbles = [f"{facts[which]:.1%}" for which in ("bubble_makespan", "bubble_span")]
        lines += table(columns, [(name, short(facts["makespan"]), *bubbles, peak)])
    return "\n".join(lines)


def schedule_summary(facts: dict[str, Any]) -> str:
    costs = facts["costs"]
    times = f"F {short(costs['forward'])}, B {short(costs['backward_input'])}, W {short(costs['backward_weight'])}"
    return f"makespan {short(facts['makespan'])} for {times}, transfer {short(costs['comm'])}; {_bubbles(facts)}"


def pass_facts(found: MeasuredPass) -> dict[str, Any]:
    """For JSON; times in seconds. A trace has no memory in it: ``peak_activations`` is the schedule's own."""
    return {
        **_shape(found.schedule),
        "model": found.model,
        "peak_activations": list(found.schedule.peak_activations),
        "measured": _times(found.measured),
        "predicted": _times(found.predicted),
    }


def pass_text(found: MeasuredPass) -> str:
    schedule, facts = found.schedule, pass_facts(found)
    lines = [
        f"{schedule.name}: pp={schedule.pp_size}, {schedule.stages_per_rank} stages per rank, "
        f"{schedule.num_micro_batches} micro-batches, model {found.model!r}",
        "predicted: the schedule with the mean times of this pass, and transfers that take none",
        "",
    ]
    sides = facts["measured"], facts["predicted"]
    rows = [("", "measured", "predicted"), ("makespan", *(f"{short(side['makespan'])} s" for side in sides))]
    for label, key in (("bubble of the step", "bubble_makespan"), ("bubble inside a rank", "bubble_span")):
        rows.append((label, *(f"{side[key]:.1%}" for side in sides)))
    return "\n".join([*lines, *table("{:22}{:>12}{:>12}", rows)])


def _shape(schedule: Schedule) -> dict[str, Any]:
    return {
        "schedule": schedule.name,
        "pp": schedule.pp_size,
        "num_micro_batches": schedule.num_micro_batches,
        "stages_per_rank": schedule.stages_per_rank,
    }


def _bubbles(facts: Mapping[str, Any]) -> str:
    return f"bubble {facts['bubble_makespan']:.1%} of the step, {facts['bubble_span']:.1%} inside a rank"


def _times(timeline: Timeline) -> dict[str, float]:
    return {name: getattr(timeline, name) for name in ("makespan", "bubble_makespan", "bubble_span")}


def draw_schedule(schedule: Schedule, timeline: Timeline, facts: str, *, until: float | None = None) -> Picture:
    """Numbers in the boxes are micro-batches; ``until`` is where the axis ends at the earliest."""
    end = max(timeline.makespan, until or 0.0)
    shortest = min(span.end - span.start for own in timeline.spans for span in own)
    width = min(max(NARROWEST, LEFT + RIGHT + PER_COMPUTATION * end / shortest), WIDEST) if until is None else MIDDLING
    scale = (width - LEFT - RIGHT) / end
    tops = [TOP + rank * (LANE + STRIP + GAP) for rank in range(schedule.pp_size)]
    bottom = TOP + schedule.pp_size * (LANE + STRIP + GAP)
    shapes: list[Rectangle | Text] = [
        Text(LEFT, 18, f"{schedule.name}: {schedule.pp_size} ranks, {schedule.num_micro_batches} micro-batches", size=15),
        Text(LEFT, 38, facts, fill=QUIET),
        *_legend(schedule),
        *(Rectangle(LEFT, top, width - LEFT - RIGHT, LANE, LANE_FILL) for top in tops),
        *_ticks(end, scale, bottom),
    ]
    most = max(*timeline.peak_activations, 1)
    for rank, (spans, top) in enumerate(zip(timeline.spans, tops, strict=True)):
        shapes.append(Text(LEFT - 8, top + LANE / 2, f"rank {rank}", anchor="end"))
        for span in spans:
            shapes.extend(_box(span, schedule.stages_of(rank)[0], top, scale))
        if not schedule.forward_only:
            shapes.extend(_activations(spans, most, top + LANE + STRIP, scale))
            peak = f"peak {timeline.peak_activations[rank]}"
            shapes.append(Text(width - RIGHT + 8, top + LANE + STRIP / 2, peak, fill=QUIET, size=11))
    return Picture(width, bottom + BOTTOM, f"timeline of {schedule.name}", shapes)


def draw_pass(found: MeasuredPass) -> Picture:
    longest = max(found.measured.makespan, found.predicted.makespan)

    def draw(label: str, timeline: Timeline) -> Picture:
        facts = f"{label}: makespan {short(timeline.makespan)} s; {_bubbles(_times(timeline))}"
        return draw_schedule(found.schedule, timeline, facts, until=longest)

    above, below = draw("measured, in seconds", found.measured), draw("predicted from its mean times", found.predicted)
    shapes = [*above.shapes, *(replace(shape, y=shape.y + above.height) for shape in below.shapes)]
    return Picture(above.width, above.height + below.height, above.title, shapes)


def _box(span: Span, first_stage: int, top: float, scale: float) -> Iterator[Rectangle | Text]:
    kind, stage, micro_batch = span.action
    name, dark, pale = KINDS[kind]
    first = stage == first_stage
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    tip = f"{name}, stage {stage}, micro-batch {micro_batch}: {short(span.start)} to {short(span.end)}"
    yield Rectangle(x, top, max(width - 1, 0.5), LANE, dark if first else pale, tip)
    label = str(micro_batch)
    if len(label) * CHARACTER + 3 <= width:
        yield Text(x + (width - 1) / 2, top + LANE / 2, label, WHITE if first else INK, 11, "middle")


def _activations(spans: Sequence[Span], most: int, bottom: float, scale: float) -> Iterator[Rectangle]:
    """Steps as high as what is held; the highest of all ranks fills the strip."""
    changes: Counter[float] = Counter()
    for span in spans:
        if span.action.kind is Kind.FORWARD:
            changes[span.start] += 1
        elif span.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            changes[span.end] -= 1
    held = 0
    for start, end in pairwise(sorted(moment for moment, change in changes.items() if change)):
        held += changes[start]
        height = (STRIP - 3) * held / most
        if held:
            tip = f"{held} activations held"
            yield Rectangle(LEFT + start * scale, bottom - height, (end - start) * scale, height, STRIP_FILL, tip)


def _ticks(makespan: float, scale: float, bottom: float) -> Iterator[Rectangle | Text]:
    for tick in linear_axis(0.0, makespan, 0.0, 1.0, about=10, whole=makespan > 10).ticks:
        if tick <= makespan:
            yield Rectangle(LEFT + tick * scale, TOP - 4, 1, bottom - TOP + 2, GRID)
            yield Text(LEFT + tick * scale, bottom + 8, short(tick), QUIET, 11, "middle")


def _legend(schedule: Schedule) -> Iterator[Rectangle | Text]:
    present = {action.kind for own in schedule.actions for action in own}
    x: float = LEFT
    shades = 2 if schedule.stages_per_rank > 1 else 1
    for name, *colours in (each for kind, each in KINDS.items() if kind in present):
        for shade, colour in enumerate(colours[:shades]):
            yield Rectangle(x + shade * 11, LEGEND - 5, 10, 10, colour)
        x += shades * 11 + 4
        yield Text(x, LEGEND, name, size=11, fill=QUIET)
        x += len(name) * 5.8 + 16
    if shades > 1:
        yield Text(x, LEGEND, "dark: first stage of the rank", size=11, fill=QUIET)
        x += 160
    if not schedule.forward_only:
        yield Rectangle(x, LEGEND - 2, 10, 7, STRIP_FILL)
        yield Text(x + 14, LEGEND, "activations held", size=11, fill=QUIET)
