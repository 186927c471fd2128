"""A schedule's timeline as a picture: a lane for each rank, with the activations that it holds below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rl_backend.cli.picture import Picture, Rectangle, Text
from rl_backend.pipeline import Kind, Schedule, Span, Timeline
from rl_backend.report.numbers import linear_axis, short

LEFT, RIGHT, TOP, BOTTOM = 64, 78, 76, 30
LANE, STRIP, GAP = 24, 16, 10
NARROWEST, MIDDLING, WIDEST, PER_COMPUTATION = 760, 1200, 2400, 22
LEGEND = 57
CHARACTER = 6.6
"""Width of a digit of a label."""

INK, QUIET, WHITE = "#1c2330", "#5b6675", "#ffffff"
LANE_FILL, STRIP_FILL, GRID = "#eef1f5", "#98a3b3", "#d5dbe3"

FILLS = {
    Kind.FORWARD: ("#2463b4", "#9cc3f0"),
    Kind.BACKWARD: ("#a3480b", "#f5b98a"),
    Kind.BACKWARD_INPUT: ("#d97706", "#fbd38d"),
    Kind.BACKWARD_WEIGHT: ("#178a63", "#9fdcc3"),
}
"""Of a rank's first stage, and of its other ones."""

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for inputs",
    Kind.BACKWARD_WEIGHT: "backward for weights",
}


def draw_schedule(schedule: Schedule, timeline: Timeline, facts: str, *, until: float | None = None) -> Picture:
    """The picture; numbers in the boxes are micro-batches, ``facts`` stands below the title.

    Args:
        until: where the axis ends, at the earliest; None ends it with the timeline.
    """
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


def _box(span: Span, first_stage: int, top: float, scale: float) -> Iterator[Rectangle | Text]:
    kind, stage, micro_batch = span.action
    first = stage == first_stage
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    tip = f"{NAMES[kind]}, stage {stage}, micro-batch {micro_batch}: {short(span.start)} to {short(span.end)}"
    yield Rectangle(x, top, max(width - 1, 0.5), LANE, FILLS[kind][0 if first else 1], tip)
    label = str(micro_batch)
    if len(label) * CHARACTER + 3 <= width:
        yield Text(x + (width - 1) / 2, top + LANE / 2, label, WHITE if first else INK, 11, "middle")


def _activations(spans: Sequence[Span], most: int, bottom: float, scale: float) -> Iterator[Rectangle]:
    """Steps as high as what is held, the highest of all ranks filling the strip."""
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
    """What the colours are."""
    kinds = [kind for kind in FILLS if any(action.kind is kind for own in schedule.actions for action in own)]
    x: float = LEFT
    shades = 2 if schedule.stages_per_rank > 1 else 1
    for kind in kinds:
        for shade in range(shades):
            yield Rectangle(x + shade * 11, LEGEND - 5, 10, 10, FILLS[kind][shade])
        x += shades * 11 + 4
        yield Text(x, LEGEND, NAMES[kind], size=11, fill=QUIET)
        x += len(NAMES[kind]) * 5.8 + 16
    if shades > 1:
        yield Text(x, LEGEND, "dark: first stage of the rank", size=11, fill=QUIET)
        x += 160
    if not schedule.forward_only:
        yield Rectangle(x, LEGEND - 2, 10, 7, STRIP_FILL)
        yield Text(x + 14, LEGEND, "activations held", size=11, fill=QUIET)
