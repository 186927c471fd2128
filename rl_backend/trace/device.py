"""Spans of work on a GPU, which continues after the call that starts it has returned."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from rl_backend.trace.recorder import Argument, Event, TraceRecorder, recorder

REFERENCE_NS = 2_000_000_000
"""Age at which a reference is replaced: CUDA gives times as float32 milliseconds, which are exact to 0.2 µs up to 2 s."""


def device_span(device: torch.device, name: str, category: str, **arguments: Argument) -> AbstractContextManager[object]:
    """:func:`~rl_backend.trace.recorder.span` of what its body puts on ``device``'s current stream.

    On a GPU the span is from when the stream reaches the body to when it has done it, measured by CUDA events; the device is
    waited for once every two seconds, to place its clock; a body that an error leaves is not recorded. Elsewhere it is the
    time of the body.
    """
    if device.type != "cuda" or not recorder.recording:
        return recorder.span(name, category, **arguments)
    return _cuda_span(recorder, name, category, {**arguments, "device": str(device)}, _reference(device), device)


@dataclass(frozen=True)
class _Reference:
    """A CUDA event, and the host's monotonic clock in nanoseconds when it happened."""

    event: torch.cuda.Event
    happened: int


_references: dict[torch.device, _Reference] = {}


def _reference(device: torch.device) -> _Reference:
    known = _references.get(device)
    if known is None or time.monotonic_ns() - known.happened > REFERENCE_NS:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        known = _references[device] = _Reference(event, time.monotonic_ns())
    return known


@contextmanager
def _cuda_span(
    of: TraceRecorder, name: str, category: str, arguments: dict[str, Argument], reference: _Reference, device: torch.device
) -> Generator[None]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    # An error leaves here: after one of the device every call to it fails as well, and would replace the error.
    yield
    end.record(stream)
    thread = of.thread

    def resolve() -> Event | None:
        if not end.query():
            return None
        start = reference.happened + reference.event.elapsed_time(begin) * 1e6
        return Event(name, category, int(start), int(begin.elapsed_time(end) * 1e6), thread, arguments)

    of.add_when_known(resolve)
