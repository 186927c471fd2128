"""One step of a trace: which events to draw, and on which line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_backend.trace import read_trace

MOST_LANES = 16
"""Processes that are drawn; of a larger run the trace itself shows all."""

READ_BYTES = 16 * 2**20
"""Of a longer trace, its end."""


@dataclass(frozen=True)
class Bar:
    """An event; times are milliseconds from the beginning of the step, ``depth`` counts the events around it."""

    name: str
    category: str
    start: float
    end: float
    depth: int
    arguments: dict[str, Any]


@dataclass
class Lane:
    """One thread of one process."""

    name: str
    pid: int
    tid: int
    bars: list[Bar] = field(default_factory=list)

    @property
    def depths(self) -> int:
        return max((bar.depth for bar in self.bars), default=0) + 1


@dataclass(frozen=True)
class Arrow:
    """From one event to another: ``(pid, tid, milliseconds)``."""

    name: str
    start: tuple[int, int, float]
    end: tuple[int, int, float]


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
    lanes: list[Lane]
    arrows: list[Arrow]
    hidden: list[str]


def read_step(path: Path) -> StepTimeline | None:
    """The step of median length among those at the end of a trace; None when it has none."""
    events = [event for event in read_trace(path, READ_BYTES) if _is_whole(event)]
    steps = sorted((event for event in events if event.get("cat") == "step"), key=lambda event: event["ts"])
    if not steps:
        return None
    # The first has the set-up in it; of the last two, a run that goes on may not have the actors' events yet.
    steps = steps[1:-2] or steps
    middle = statistics.median_low(event["dur"] for event in steps)
    step = next(event for event in steps if event["dur"] == middle)
    start, end = step["ts"], step["ts"] + step["dur"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    lanes: dict[tuple[int, int], Lane] = {}
    ends: dict[tuple[int, int], list[float]] = {}
    inside = [
        event
        for event in events
        if event.get("ph") == "X" and event["cat"] != "step" and event["ts"] < end and event["ts"] + event["dur"] > start
    ]
    for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
        key = event["pid"], event["tid"]
        lane = lanes.setdefault(key, Lane(names.get(event["pid"], f"process {event['pid']}"), *key))
        first, last = (event["ts"] - start) / 1000, (event["ts"] + event["dur"] - start) / 1000
        around = ends.setdefault(key, [])
        while around and around[-1] <= first + 1e-6:
            around.pop()
        lane.bars.append(Bar(event["name"], event["cat"], first, last, len(around), event.get("args", {})))
        around.append(last)
    ordered = [lanes[key] for key in sorted(lanes)]
    # Both ends of a large run: the driver and ranks come first, engines last.
    left_out = slice(MOST_LANES // 2, max(MOST_LANES // 2, len(ordered) - MOST_LANES // 2))
    hidden = ordered[left_out]
    shown = [lane for lane in ordered if lane not in hidden]
    return StepTimeline(
        int(step["args"]["step"]),
        step["dur"] / 1000,
        shown,
        _arrows(events, start, end, {(lane.pid, lane.tid) for lane in shown}),
        sorted({lane.name for lane in hidden}),
    )


def _is_whole(event: dict[str, Any]) -> bool:
    """Whether an event has what is read of it: a viewer may have saved, or a person cut, the trace."""
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


def _arrows(events: Sequence[dict[str, Any]], start: float, end: float, shown: set[tuple[int, int]]) -> list[Arrow]:
    begun: dict[int, dict[str, Any]] = {}
    arrows = []
    for event in events:
        if event.get("ph") == "s":
            begun[event["id"]] = event
        elif event.get("ph") == "f" and event["id"] in begun:
            first = begun.pop(event["id"])
            ends = [(one["pid"], one["tid"], (one["ts"] - start) / 1000) for one in (first, event)]
            if start <= event["ts"] <= end and all((pid, tid) in shown for pid, tid, _ in ends):
                arrows.append(Arrow(event["name"], ends[0], ends[1]))
    return arrows
