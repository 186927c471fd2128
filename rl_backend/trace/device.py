"""Spans of work on a GPU, which continues after the call that starts it has returned."""

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from rl_backend.trace.recorder import Argument, Event, recorder

REFERENCE_NS = 2_000_000_000
"""Age at which a reference is replaced: CUDA gives times as float32 milliseconds, which are exact to 0.2 µs up to 2 s."""


_references: dict[torch.device, tuple[torch.cuda.Event, int]] = {}
"""Of each device a CUDA event, and the host's monotonic clock in nanoseconds when it happened."""


@contextmanager
def device_span(device: torch.device, name: str, category: str, **arguments: Argument) -> Generator[None]:
    """:func:`~rl_backend.trace.recorder.span` of what its body puts on ``device``'s current stream.

    On a GPU the span is from when the stream reaches the body to when it has done it, measured by CUDA events; a body that
    an error leaves is not recorded. Elsewhere it is the time of the body.
    """
    if device.type != "cuda" or not recorder.recording:
        with recorder.span(name, category, **arguments):
            yield
        return
    reference, happened = _reference(device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    # An error leaves here: after one of the device every call to it fails as well, and would replace the error.
    yield
    end.record(stream)
    thread = recorder.thread

    def resolve() -> Event | None:
        if not end.query():
            return None
        start, duration = happened + reference.elapsed_time(begin) * 1e6, begin.elapsed_time(end) * 1e6
        return Event(name, category, int(start), int(duration), thread, {**arguments, "device": str(device)})

    recorder.add_when_known(resolve)


def _reference(device: torch.device) -> tuple[torch.cuda.Event, int]:
    known = _references.get(device)
    if known is None or time.monotonic_ns() - known[1] > REFERENCE_NS:
        # The device is waited for once every two seconds, to place its clock beside the host's.
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
        known = _references[device] = event, time.monotonic_ns()
    return known
