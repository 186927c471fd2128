"""Chrome's trace-event format, which Perfetto and chrome://tracing open; see "Trace Event Format" (Google, 2016)."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20
"""Size at which a trace ends, with an event that says so; what follows is counted and not written."""


class ChromeTraceWriter:
    """Writes events to ``path``; times are microseconds from the beginning of the trace."""

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115, closed by close()
        self._left = MAX_BYTES
        self._unwritten = 0
        self._separator = "[\n"

    def process(self, pid: int, name: str) -> None:
        self._metadata("process_name", pid, {"name": name})
        self._metadata("process_sort_index", pid, {"sort_index": pid})

    def thread(self, pid: int, tid: int, name: str) -> None:
        self._metadata("thread_name", pid, {"name": name}, tid)
        self._metadata("thread_sort_index", pid, {"sort_index": tid}, tid)

    def complete(
        self, pid: int, tid: int, name: str, category: str, start: float, duration: float, arguments: Mapping[str, Any]
    ) -> None:
        self._event("X", name, category, (pid, tid, start), dur=round(duration, 3), args=dict(arguments))

    def instant(self, pid: int, name: str, category: str, when: float, arguments: Mapping[str, Any]) -> None:
        """A moment, drawn across its process."""
        self._event("i", name, category, (pid, 0, when), s="p", args=dict(arguments))

    def arrow(
        self, number: int, name: str, category: str, start: tuple[int, int, float], end: tuple[int, int, float]
    ) -> None:
        """An arrow from the span at (pid, tid, time) ``start`` to the one at ``end``; ``number`` is its own."""
        self._event("s", name, category, start, id=number)
        self._event("f", name, category, end, id=number, bp="e")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Ends the array; a second call does nothing."""
        if self._file.closed:
            return
        if self._unwritten:
            # Room for the event that says so.
            self._left = 4096
            self._event("i", "trace full", "trace", (0, 0, 0.0), s="g", args={"events_not_written": self._unwritten})
        self._file.write("\n]\n" if self._separator == ",\n" else "[]\n")
        self._file.close()

    def _metadata(self, name: str, pid: int, arguments: Mapping[str, Any], tid: int = 0) -> None:
        self._write({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": dict(arguments)})

    def _event(self, phase: str, name: str, category: str, at: tuple[int, int, float], **fields: Any) -> None:
        pid, tid, when = at
        self._write({"name": name, "cat": category, "ph": phase, "ts": round(when, 3), "pid": pid, "tid": tid, **fields})

    def _write(self, event: Mapping[str, Any]) -> None:
        # Strict JSON: a viewer refuses a bare NaN.
        line = json.dumps(_finite(event), allow_nan=False, separators=(",", ":"))
        if len(line) + 2 > self._left:
            self._left, self._unwritten = 0, self._unwritten + 1
            return
        self._left -= len(line) + 2
        self._file.write(self._separator + line)
        self._separator = ",\n"


def read_trace(path: Path | str) -> list[dict[str, Any]]:
    """The events of a trace that :class:`ChromeTraceWriter` wrote, even if it was cut off in the middle."""
    events = []
    for line in Path(path).read_bytes().split(b"\n"):
        text = line.strip().rstrip(b",")
        if text.startswith(b"{"):
            try:
                events.append(json.loads(text))
            except ValueError:  # half a line, at the end of a run that was killed
                continue
    return events


def _finite(value: Any) -> Any:
    """``value`` in what strict JSON has: numbers of NumPy and PyTorch as numbers, anything else that it lacks as text."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if getattr(value, "shape", None) == () and isinstance(number := value.item(), int | float):
        value = number
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)
