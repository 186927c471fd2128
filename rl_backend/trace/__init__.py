"""Recording what every process of a run does when, and writing it as a Chrome trace."""

from rl_backend.trace.chrome import ChromeTraceWriter, read_trace
from rl_backend.trace.recorder import CATEGORIES, Event, TraceBatch, TraceRecorder, recorder, span

__all__ = [
    "CATEGORIES",
    "ChromeTraceWriter",
    "Event",
    "TraceBatch",
    "TraceRecorder",
    "read_trace",
    "recorder",
    "span",
]
