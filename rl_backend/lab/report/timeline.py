"""One step of a trace as swim lanes: which events to draw, and on which line."""

from __future__ import annotations

import statistics
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_backend.lab.picture import Axis, Html, drawing, join, legend, linear_axis, tag
from rl_backend.lab.text import short
from rl_backend.trace import read_trace

MOST_LANES = 16
"""Processes that are drawn; of a larger run the trace itself shows all."""

READ_BYTES = 16 * 2**20
"""Of a longer trace, its end."""

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


@dataclass(frozen=True)
class Bar:
    """An event; times are milliseconds from the beginning of the step, ``depth`` counts the events around it."""

    name: str
    category: str
    start: float
    end: float
    depth: int
    arguments: dict[str, Any]


type Thread = tuple[int, int]
"""Numbers of a process and of a thread in it."""


@dataclass
class Lane:
    """What one thread did."""

    name: str
    bars: list[Bar] = field(default_factory=list)

    @property
    def depths(self) -> int:
        return max((bar.depth for bar in self.bars), default=0) + 1


@dataclass(frozen=True)
class Arrow:
    """From one event to another, each by its thread and the milliseconds at which it is met."""

    name: str
    start: tuple[Thread, float]
    end: tuple[Thread, float]


@dataclass(frozen=True)
class StepTimeline:
    """What every process did in one step.

    Attributes:
        step: its number.
        milliseconds: its length.
        hidden: names of processes that are left out.
    """

    step: int
    milliseconds: float
    lanes: dict[Thread, Lane]
    arrows: list[Arrow]
    hidden: list[str]


def read_step(path: Path) -> StepTimeline | None:
    """The step of median length among those at the end of a trace; None when it has none."""
    events = [event for event in read_trace(path, READ_BYTES) if _is_whole(event)]
    steps = sorted((event for event in events if event.get("cat") == "step"), key=lambda event: event["ts"])
    if not steps:
        return None
    # The first includes the set-up. A run that continues may not have the actors' events of the last two yet.
    steps = steps[1:-2] or steps
    middle = statistics.median_low(event["dur"] for event in steps)
    step = next(event for event in steps if event["dur"] == middle)
    start, end = step["ts"], step["ts"] + step["dur"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    lanes: dict[Thread, Lane] = {}
    ends: dict[Thread, list[float]] = {}
    inside = [
        event
        for event in events
        if event.get("ph") == "X" and event["cat"] != "step" and event["ts"] < end and event["ts"] + event["dur"] > start
    ]
    for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
        key = event["pid"], event["tid"]
        lane = lanes.setdefault(key, Lane(names.get(event["pid"], f"process {event['pid']}")))
        first, last = (event["ts"] - start) / 1000, (event["ts"] + event["dur"] - start) / 1000
        around = ends.setdefault(key, [])
        while around and around[-1] <= first + 1e-6:
            around.pop()
        lane.bars.append(Bar(event["name"], event["cat"], first, last, len(around), event.get("args", {})))
        around.append(last)
    # Both ends of a large run: the driver and ranks come first, engines last.
    half = MOST_LANES // 2
    hidden = sorted(lanes)[half : max(half, len(lanes) - half)]
    shown = {key: lanes[key] for key in sorted(lanes) if key not in hidden}
    arrows = _arrows(events, start, end, shown)
    left_out = sorted({lanes[key].name for key in hidden})
    return StepTimeline(int(step["args"]["step"]), step["dur"] / 1000, shown, arrows, left_out)


def draw_timeline(timeline: StepTimeline) -> Html:
    """A figure with a lane for each process; arrows lead from a weight push over its load to the sampling that uses it."""
    lanes = timeline.lanes
    left = max(len(lane.name) for lane in lanes.values()) * CHARACTER + 20 if lanes else 0.0
    across = linear_axis(0.0, timeline.milliseconds, left, WIDTH - RIGHT, about=8, whole=timeline.milliseconds > 8)
    tops: dict[Thread, float] = {}
    y = 8.0
    for key, lane in lanes.items():
        tops[key] = y
        y += lane.depths * ROW + LANE_GAP
    bars = [(key, bar) for key, lane in lanes.items() for bar in lane.bars]
    wide = [(key, bar) for key, bar in bars if _extent(bar, across)[1] >= THIN]
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
        drawing(
            WIDTH,
            round(y + BOTTOM),
            "what each process did in one step",
            *(_lane_background(lane, tops[key], across) for key, lane in lanes.items()),
            _ticks(across, y),
            *(_bar(bar, tops[key], across) for key, bar in wide),
            *(_arrow(arrow, tops, lanes, across) for arrow in timeline.arrows),
            class_="timeline",
        ),
        legend((f"k-{kind}", [KINDS[kind]]) for kind in kinds),
        tag("figcaption", *notes, "A step of median length. Arrows: weights, from the push to the sampling that uses them."),
        class_="wide",
        id="timeline",
    )


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether an event has all fields that are read: a viewer may have saved the trace, or a person may have cut it."""
    numbers = {
        "X": ("ts", "dur", "pid", "tid"),
        "s": ("ts", "pid", "tid", "id"),
        "f": ("ts", "pid", "tid", "id"),
        "M": ("pid",),
    }
    needed = numbers.get(event.get("ph", ""))
    if needed is None or not isinstance(event.get("name"), str):
        return False
    known = all(isinstance(event.get(name), int | float) for name in needed)
    arguments = event.get("args", {})
    if event["name"] == "process_name":
        return known and "name" in arguments
    return known and isinstance(arguments, dict) and (event.get("cat") != "step" or "step" in arguments)


def _arrows(events: Sequence[dict[str, Any]], start: float, end: float, shown: Container[Thread]) -> list[Arrow]:
    begun: dict[int, dict[str, Any]] = {}
    arrows = []
    for event in events:
        if event.get("ph") == "s":
            begun[event["id"]] = event
        elif event.get("ph") == "f" and event["id"] in begun:
            first = begun.pop(event["id"])
            ends = [((one["pid"], one["tid"]), (one["ts"] - start) / 1000) for one in (first, event)]
            if start <= event["ts"] <= end and all(key in shown for key, _ in ends):
                arrows.append(Arrow(event["name"], ends[0], ends[1]))
    return arrows


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
    parts = []
    for tick in across.ticks:
        x = f"{across.at(tick):.1f}"
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=4, y2=f"{bottom:.0f}"))
        parts.append(tag("text", short(tick), x=x, y=f"{bottom + 14:.0f}", text_anchor="middle"))
    return join(*parts)


def _bar(bar: Bar, top: float, across: Axis) -> Html:
    left, width = _extent(bar, across)
    y = top + bar.depth * ROW
    label = bar.name.removeprefix("run_on_ranks(").removesuffix(")")
    fits = len(label) * CHARACTER + 8 <= width
    facts = (f"{key.replace('_', ' ')} {value}" for key, value in bar.arguments.items())
    return tag(
        "g",
        tag("rect", x=f"{left:.2f}", y=f"{y:.1f}", width=f"{max(width, 0.6):.2f}", height=ROW - 2, rx=min(2.0, width / 2)),
        tag("text", label, x=f"{left + 4:.1f}", y=f"{y + 11:.1f}") if fits else None,
        class_=f"event k-{_kind(bar)}",
        data_tip="\n".join([f"{bar.name}: {short(bar.end - bar.start)} ms", *facts]),
    )


def _arrow(arrow: Arrow, tops: Mapping[Thread, float], lanes: Mapping[Thread, Lane], across: Axis) -> Html:
    ends = []
    for key, milliseconds in (arrow.start, arrow.end):
        around = [bar.depth for bar in lanes[key].bars if bar.start - 1e-6 <= milliseconds <= bar.end + 1e-6]
        ends.append((across.at(milliseconds), tops[key] + max(around, default=0) * ROW + ROW / 2 - 1))
    (x1, y1), (x2, y2) = ends
    bend = max(18.0, (x2 - x1) / 2)
    return tag(
        "g",
        tag("path", d=f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2 - 3:.1f} {y2:.1f}"),
        tag("path", class_="head", d=f"M{x2:.1f} {y2:.1f}l-5 -3v6z"),
        class_="arrow",
        data_tip=arrow.name,
    )
