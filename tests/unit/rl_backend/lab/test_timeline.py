"""One step of a trace as swim lanes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_backend.lab.report import timeline as module
from rl_backend.lab.report.timeline import Bar, StepTimeline, draw_timeline, read_step
from tests.support.page import Element, read_page


def event(
    name: str, category: str, start: float, duration: float, pid: int = 1, tid: int = 0, **more: Any
) -> dict[str, Any]:
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": pid, "tid": tid, "args": more}


def arrow(phase: str, id_: int, moment: float, pid: int, name: str = "weights") -> dict[str, Any]:
    return {"ph": phase, "name": name, "cat": "push", "id": id_, "ts": moment, "pid": pid, "tid": 0}


def named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def read(folder: Path, *events: dict[str, Any]) -> StepTimeline | None:
    path = folder / "trace.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return read_step(path)


def step(number: int, start: float, duration: float) -> dict[str, Any]:
    return event("step", "step", start, duration, step=number)


def test_the_step_is_the_one_of_median_length_without_the_first_and_the_last_two(tmp_path: Path) -> None:
    lengths = [900.0, 50.0, 20.0, 40.0, 30.0, 1.0, 2.0]
    steps = [step(number, 1000.0 * number, length) for number, length in enumerate(lengths)]
    found = read(tmp_path, *reversed(steps))
    assert found is not None and (found.step, found.milliseconds) == (4, 0.03), "the lower of the two in the middle"
    for few, expected in ((steps[:3], 1), (steps[:1], 0), (steps[:4], 1)):
        found = read(tmp_path, *few)
        assert found is not None and found.step == expected
    assert read(tmp_path, event("forward", "micro_batch", 0, 1)) is None and read(tmp_path) is None


def test_events_lie_in_their_lanes_inside_of_what_is_around_them(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        step(3, 1000.0, 4000.0),
        named(1, "driver"),
        named(2, "rank 0"),
        event("outer", "operation", 1500.0, 2000.0, 2, weight_version=4),
        event("inner", "micro_batch", 1500.0, 500.0, 2),
        event("deep", "micro_batch", 1600.0, 100.0, 2),
        event("next", "micro_batch", 2000.0, 100.0, 2),
        event("after", "phase", 3500.0, 100.0, 2),
        event("other thread", "phase", 1600.0, 100.0, 2, 1),
        event("begins before", "phase", 500.0, 600.0, 1),
        event("ends after", "phase", 4900.0, 1000.0, 1),
        event("ended before", "phase", 500.0, 500.0, 1),
        event("begins after", "phase", 5000.0, 500.0, 1),
        event("unnamed", "phase", 2000.0, 500.0, 3),
    )
    assert found is not None
    lanes = {key: (lane.name, [(bar.name, bar.depth) for bar in lane.bars]) for key, lane in found.lanes.items()}
    assert lanes == {
        (1, 0): ("driver", [("begins before", 0), ("ends after", 0)]),
        (2, 0): ("rank 0", [("outer", 0), ("inner", 1), ("deep", 2), ("next", 1), ("after", 0)]),
        (2, 1): ("rank 0", [("other thread", 0)]),
        (3, 0): ("process 3", [("unnamed", 0)]),
    }
    outer = found.lanes[2, 0].bars[0]
    assert (outer.start, outer.end, outer.arguments) == (0.5, 2.5, {"weight_version": 4})
    assert outer.tip == "outer: 2 ms\nweight version 4"
    before = found.lanes[1, 0].bars[0]
    assert (before.start, before.end) == (-0.5, 0.1)
    assert [found.lanes[key].depths for key in ((2, 0), (1, 0))] == [3, 1]


def test_arrows_lead_to_what_ends_in_the_step(tmp_path: Path) -> None:
    events = [event("a", "push", 0.0, 5000.0, pid) for pid in (1, 2, 3)]
    found = read(
        tmp_path,
        step(1, 1000.0, 1000.0),
        *events,
        arrow("s", 1, 900.0, 1),
        arrow("s", 2, 1100.0, 2, "second"),
        arrow("f", 1, 1000.0, 3),
        arrow("f", 2, 2000.0, 1, "second"),
        arrow("f", 7, 1500.0, 1),
        arrow("s", 3, 1100.0, 1),
        arrow("f", 3, 2001.0, 2),
        arrow("s", 4, 1100.0, 9),
        arrow("f", 4, 1200.0, 2),
        arrow("s", 1, 1300.0, 2, "again"),
        arrow("f", 1, 1400.0, 3, "again"),
    )
    assert found is not None and found.arrows == [
        ("weights", ((1, 0), -0.1), ((3, 0), 0.0)),
        ("second", ((2, 0), 0.1), ((1, 0), 1.0)),
        ("again", ((2, 0), 0.3), ((3, 0), 0.4)),
    ]


@pytest.mark.parametrize(("count", "hidden"), [(4, []), (5, [2]), (7, [2, 3, 4])])
def test_of_many_processes_the_first_and_the_last_are_shown(
    count: int, hidden: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LANES", 4)
    events = [event("a", "phase", 10.0, 5.0, pid) for pid in reversed(range(count))]
    found = read(tmp_path, step(1, 0.0, 100.0), *(named(pid, f"p{pid}") for pid in range(count)), *events)
    assert found is not None and found.hidden == [f"p{pid}" for pid in hidden]
    assert list(found.lanes) == [(pid, 0) for pid in range(count) if pid not in hidden]


@pytest.mark.parametrize(
    "damaged",
    [
        {"ph": "X", "name": "a", "cat": "phase", "ts": 10.0, "pid": 1, "tid": 0},
        {"ph": "X", "name": 3, "cat": "phase", "ts": 10.0, "dur": 1.0, "pid": 1, "tid": 0},
        {"ph": "X", "name": "a", "cat": "phase", "ts": "10", "dur": 1.0, "pid": 1, "tid": 0},
        {"ph": "X", "name": "a", "cat": "phase", "ts": 10.0, "dur": 1.0, "pid": 1, "tid": 0, "args": 3},
        {"ph": "X", "name": "step", "cat": "step", "ts": 200.0, "dur": 1.0, "pid": 1, "tid": 0, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {}},
        {"ph": "B", "name": "a", "cat": "phase", "ts": 10.0, "dur": 1.0, "pid": 1, "tid": 0},
        {"ph": "s", "name": "a", "ts": 10.0, "pid": 1, "tid": 0},
        {"name": "a"},
    ],
)
def test_an_event_without_all_its_fields_is_left_out(damaged: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, damaged, step(1, 0.0, 100.0), event("whole", "phase", 10.0, 5.0, 2))
    assert found is not None and found.step == 1
    assert {key: [bar.name for bar in lane.bars] for key, lane in found.lanes.items()} == {(2, 0): ["whole"]}


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("F", "micro_batch", "forward"),
        ("backward", "micro_batch", "backward"),
        ("W", "micro_batch", "micro_batch"),
        ("forward", "rollout", "rollout"),
        ("x", "unheard of", "operation"),
    ],
)
def test_a_bar_has_the_colour_of_its_kind(name: str, category: str, kind: str) -> None:
    assert Bar(name, category, 0.0, 1.0, 0, {}).kind == kind
    assert Bar("run_on_ranks(push)", category, 0.0, 1.0, 0, {}).label == "push"


def drawn(found: StepTimeline, folder: Path) -> Element:
    (folder / "part.html").write_text(f"<!DOCTYPE html><html><body>{draw_timeline(found)}</body></html>")
    return read_page(folder / "part.html")


def test_the_drawing_says_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LANES", 2)
    found = read(
        tmp_path,
        step(7, 0.0, 10000.0),
        event("long", "rollout", 0.0, 5000.0, 1),
        event("short", "phase", 6000.0, 1.0, 1),
        event("shorter", "phase", 7000.0, 2.0, 1),
        event("hidden", "phase", 0.0, 5000.0, 2),
        event("last", "operation", 0.0, 5000.0, 3),
    )
    assert found is not None
    text = drawn(found, tmp_path).text
    assert "2 events are too short to be seen." in text and "1 more processes are in the trace: process 2." in text
    assert "sampling" in text and "operations of a rank" in text and "the driver's phases" not in text
    nothing = StepTimeline(1, 5.0, {}, [], [])
    assert "too short" not in drawn(nothing, tmp_path).text
