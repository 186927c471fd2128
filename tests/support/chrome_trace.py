"""The rules of Chrome's trace-event format that a trace has to keep for a viewer to show it right."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NEEDED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a complete trace; fails where the file is not strict JSON or an event breaks the format."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    events = json.loads(path.read_text(), parse_constant=refuse)
    assert isinstance(events, list)
    spans: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        assert NEEDED[event["ph"]] <= set(event), event
        assert all(isinstance(event.get(name, 0), int) for name in ("pid", "tid")), event
        assert all(isinstance(event.get(name, 0), int | float) and event.get(name, 0) >= 0 for name in ("dur",)), event
        if event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"], event
        elif event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
    _check_nesting(spans)
    for ends in arrows.values():
        assert sorted(event["ph"] for event in ends) == ["f", "s"], ends
        assert len({(event["name"], event["cat"]) for event in ends}) == 1, ends
        for event in ends:
            around = [span for span in spans[event["pid"], event["tid"]] if _covers(span, event["ts"])]
            assert around, f"no span for {event}"
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert {event["pid"] for event in events if event["ph"] == "X"} <= named
    return events


def _check_nesting(spans: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    """Spans of one thread are inside each other or apart; a viewer draws others wrongly."""
    for of_thread in spans.values():
        open_ends: list[float] = []
        for span in sorted(of_thread, key=lambda span: (span["ts"], -span["dur"])):
            while open_ends and open_ends[-1] <= span["ts"] + 0.002:
                open_ends.pop()
            end = span["ts"] + span["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.002, f"{span} ends after the span around it"
            open_ends.append(end)


def _covers(span: dict[str, Any], when: float) -> bool:
    return bool(span["ts"] - 0.002 <= when <= span["ts"] + span["dur"] + 0.002)
