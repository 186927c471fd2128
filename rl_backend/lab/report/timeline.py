"""One step of a trace as swim lanes: which events to draw, and on which line."""

import statistics
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rl_backend.lab.picture import linear_axis, render
from rl_backend.lab.text import short
from rl_backend.trace.chrome import read_trace

# Processes that are drawn; of a larger run the trace itself shows all.
MOST_LANES = 16
# Of a longer trace, its end.
READ_BYTES = 16 * 2**20

WIDTH, RIGHT, BOTTOM = 920, 20, 22
ROW, LANE_GAP = 17, 9
# Pixels: width of a character of a label, and of the narrowest event that is drawn.
CHARACTER, THIN = 5.8, 0.3
# A pipeline schedule's actions have the short names.
PASSES = {"forward": "forward", "F": "forward", "backward": "backward", "B": "backward"}

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

    @property
    def kind(self) -> str:
        if self.category == "micro_batch":
            return PASSES.get(self.name, "micro_batch")
        return self.category if self.category in KINDS else "operation"

    @property
    def label(self) -> str:
        return self.name.removeprefix("run_on_ranks(").removesuffix(")")

    @property
    def tip(self) -> str:
        facts = (f"{key.replace('_', ' ')} {value}" for key, value in self.arguments.items())
        return "\n".join([f"{self.name}: {short(self.end - self.start)} ms", *facts])


type Thread = tuple[int, int]
"""Numbers of a process and of a thread in it."""

type Arrow = tuple[str, tuple[Thread, float], tuple[Thread, float]]
"""A name, and from one event to another, each by its thread and the milliseconds at which it is met."""


@dataclass
class Lane:
    name: str
    bars: list[Bar] = field(default_factory=list)

    @property
    def depths(self) -> int:
        return max((bar.depth for bar in self.bars), default=0) + 1


@dataclass(frozen=True)
class StepTimeline:
    """What every process did in one step."""

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


def draw_timeline(timeline: StepTimeline) -> Markup:
    """A figure with a lane for each process; arrows lead from a weight push over its load to the sampling that uses it."""
    lanes = timeline.lanes
    left = max(len(lane.name) for lane in lanes.values()) * CHARACTER + 20 if lanes else 0.0
    across = linear_axis(0.0, timeline.milliseconds, left, WIDTH - RIGHT, about=8, whole=timeline.milliseconds > 8)
    heights = [lane.depths * ROW + LANE_GAP for lane in lanes.values()]
    *tops, bottom = accumulate(heights, initial=8.0)
    top_of = dict(zip(lanes, tops, strict=True))
    bars = [(bar, top_of[key] + bar.depth * ROW) for key, lane in lanes.items() for bar in lane.bars]
    wide = [(bar, y) for bar, y in bars if across.at(bar.end) - across.at(bar.start) >= THIN]
    notes = f"{len(bars) - len(wide)} events are too short to be seen. " if len(wide) < len(bars) else ""
    if timeline.hidden:
        notes += f"{len(timeline.hidden)} more processes are in the trace: {', '.join(timeline.hidden)}. "

    def met(key: Thread, milliseconds: float) -> tuple[float, float]:
        around = [bar.depth for bar in lanes[key].bars if bar.start - 1e-6 <= milliseconds <= bar.end + 1e-6]
        return across.at(milliseconds), top_of[key] + max(around, default=0) * ROW + ROW / 2 - 1

    return render(
        "timeline.html",
        timeline=timeline,
        width=WIDTH,
        height=round(bottom + BOTTOM),
        bottom=bottom,
        row=ROW,
        character=CHARACTER,
        across=across,
        lanes=list(zip(lanes.values(), tops, strict=True)),
        bars=wide,
        arrows=[(name, met(*start), met(*end)) for name, start, end in timeline.arrows],
        keys=[(f"k-{kind}", KINDS[kind], None) for kind in sorted({bar.kind for bar, _ in wide}, key=list(KINDS).index)],
        notes=notes,
    )


def _is_whole(event: dict[str, Any]) -> bool:
    # A viewer may have saved the trace, or a person may have cut it.
    numbers = {"X": ("ts", "dur", "pid", "tid"), "M": ("pid",)} | dict.fromkeys("sf", ("ts", "pid", "tid", "id"))
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
            tail, head = (((one["pid"], one["tid"]), (one["ts"] - start) / 1000) for one in (first, event))
            if start <= event["ts"] <= end and tail[0] in shown and head[0] in shown:
                arrows.append((event["name"], tail, head))
    return arrows
