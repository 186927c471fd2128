"""One step of a trace as swim lanes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.report.html import Html, join, tag
from rl_backend.report.numbers import Axis, linear_axis, short
from rl_backend.report.timeline import Arrow, Bar, Lane, StepTimeline

WIDTH, RIGHT, BOTTOM = 920, 20, 22
ROW, LANE_GAP = 17, 9
CHARACTER = 5.8
"""Width of a character of a label, in pixels."""

THIN = 0.3
"""Pixels; narrower events are left out."""

PASSES = {"forward": "forward", "F": "forward", "backward": "backward", "B": "backward"}
"""Of micro-batches; a pipeline schedule's actions have the short names."""

KINDS = {
    "phase": "the driver's phases",
    "operation": "operations of a rank",
    "forward": "forward",
    "backward": "backward",
    "micro_batch": "other pipeline actions",
    "rollout": "sampling",
    "push": "weight push",
    "weights": "an engine's part of it",
}


def draw_timeline(timeline: StepTimeline) -> Html:
    """A figure with a lane for each process; arrows lead from a weight push over its load to the sampling that uses it."""
    left = max(len(lane.name) for lane in timeline.lanes) * CHARACTER + 20 if timeline.lanes else 0.0
    across = linear_axis(0.0, timeline.milliseconds, left, WIDTH - RIGHT, about=8, whole=timeline.milliseconds > 8)
    tops: dict[tuple[int, int], float] = {}
    y = 8.0
    for lane in timeline.lanes:
        tops[lane.pid, lane.tid] = y
        y += lane.depths * ROW + LANE_GAP
    height = y + BOTTOM
    bars = [(lane, bar) for lane in timeline.lanes for bar in lane.bars]
    wide = [(lane, bar) for lane, bar in bars if _extent(bar, across)[1] >= THIN]
    kinds = sorted({_kind(bar) for _, bar in wide}, key=list(KINDS).index)
    notes = [f"{len(bars) - len(wide)} events are too short to be seen. "] if len(wide) < len(bars) else []
    if timeline.hidden:
        notes.append(f"{len(timeline.hidden)} more processes are in the trace: {', '.join(timeline.hidden)}. ")
    return tag(
        "figure",
        tag(
            "h3",
            f"Step {timeline.step} on the timeline",
            tag("span", "milliseconds from its beginning", class_="unit"),
            tag("output", f"{short(timeline.milliseconds)} ms"),
        ),
        tag(
            "svg",
            *(_lane_background(lane, tops[lane.pid, lane.tid], across) for lane in timeline.lanes),
            _ticks(across, y),
            *(_bar(bar, tops[lane.pid, lane.tid], across) for lane, bar in wide),
            *(_arrow(arrow, tops, timeline, across) for arrow in timeline.arrows),
            viewBox=f"0 0 {WIDTH} {height:.0f}",
            role="img",
            aria_label="what each process did in one step",
            class_="timeline",
        ),
        tag(
            "p",
            *(tag("span", tag("i", class_=f"k-{kind}"), KINDS[kind], class_="key") for kind in kinds),
            class_="legend",
        ),
        tag("figcaption", *notes, "A step of median length. Arrows: weights, from the push to the sampling that uses them."),
        class_="wide",
        id="timeline",
    )


def _kind(bar: Bar) -> str:
    if bar.category == "micro_batch":
        return PASSES.get(bar.name, "micro_batch")
    return bar.category if bar.category in KINDS else "operation"


def _extent(bar: Bar, across: Axis) -> tuple[float, float]:
    """Left end and width in pixels."""
    left = across.at(bar.start)
    return left, across.at(bar.end) - left


def _lane_background(lane: Lane, top: float, across: Axis) -> Html:
    height = lane.depths * ROW
    return join(
        tag("rect", class_="lane", x=across.start, y=f"{top - 2:.0f}", width=across.end - across.start, height=height + 3),
        tag("text", lane.name, class_="lane-name", x=across.start - 8, y=f"{top + height / 2 + 3:.1f}", text_anchor="end"),
    )


def _ticks(across: Axis, bottom: float) -> Html:
    return join(
        *(
            join(
                tag(
                    "line", class_="grid", x1=f"{across.at(tick):.1f}", x2=f"{across.at(tick):.1f}", y1=4, y2=f"{bottom:.0f}"
                ),
                tag("text", short(tick), x=f"{across.at(tick):.1f}", y=f"{bottom + 14:.0f}", text_anchor="middle"),
            )
            for tick in across.ticks
        )
    )


def _bar(bar: Bar, top: float, across: Axis) -> Html:
    left, width = _extent(bar, across)
    y = top + bar.depth * ROW
    label = bar.name.removeprefix("run_on_ranks(").removesuffix(")")
    fits = len(label) * CHARACTER + 8 <= width
    return tag(
        "g",
        tag("rect", x=f"{left:.2f}", y=f"{y:.1f}", width=f"{max(width, 0.6):.2f}", height=ROW - 2, rx=min(2.0, width / 2)),
        tag("text", label, x=f"{left + 4:.1f}", y=f"{y + 11:.1f}") if fits else None,
        class_=f"event k-{_kind(bar)}",
        data_tip=_tip(bar.name, bar.end - bar.start, bar.arguments),
    )


def _tip(name: str, milliseconds: float, arguments: Mapping[str, Any]) -> str:
    facts = [f"{key.replace('_', ' ')} {value}" for key, value in arguments.items()]
    return "\n".join([f"{name}: {short(milliseconds)} ms", *facts])


def _arrow(arrow: Arrow, tops: Mapping[tuple[int, int], float], timeline: StepTimeline, across: Axis) -> Html:
    ends = []
    for pid, tid, milliseconds in (arrow.start, arrow.end):
        lane = next(lane for lane in timeline.lanes if (lane.pid, lane.tid) == (pid, tid))
        around = [bar.depth for bar in lane.bars if bar.start - 1e-6 <= milliseconds <= bar.end + 1e-6]
        ends.append((across.at(milliseconds), tops[pid, tid] + max(around, default=0) * ROW + ROW / 2 - 1))
    (x1, y1), (x2, y2) = ends
    bend = max(18.0, (x2 - x1) / 2)
    return tag(
        "g",
        tag("path", d=f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2 - 3:.1f} {y2:.1f}"),
        tag("path", class_="head", d=f"M{x2:.1f} {y2:.1f}l-5 -3v6z"),
        class_="arrow",
        data_tip=arrow.name,
    )
