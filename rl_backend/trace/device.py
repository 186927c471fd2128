"""Spans of work on a GPU, which continues after the call that starts it has returned."""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from rl_backend.trace.recorder import Argument, Event, Span, TraceRecorder, recorder

REFERENCE_NS = 2_000_000_000
"""Age at which a reference is replaced: CUDA gives times as float32 milliseconds, which are exact to 0.2 µs up to 2 s."""


def device_span(device: torch.device, name: str, category: str, **arguments: Argument) -> Span:
    """:func:`~rl_backend.trace.recorder.span` of what its body puts on ``device``'s current stream.

    On a GPU the span is from when the stream reaches the body to when it has done it, measured by CUDA events; the device is
    waited for once every two seconds, to place its clock; a body that an error leaves is not recorded. Elsewhere it is the
    time of the body.
    """
    if device.type != "cuda" or not recorder.recording:
        return recorder.span(name, category, **arguments)
    return _CudaSpan(recorder, name, category, {**arguments, "device": str(device)}, _reference(device), device)


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


class _CudaSpan(Span):
    __slots__ = ("_begin", "_device_reference", "_end", "_stream")

    def __init__(
        self,
        of: TraceRecorder,
        name: str,
        category: str,
        arguments: dict[str, Argument],
        reference: _Reference,
        device: torch.device,
    ) -> None:
        super().__init__(of, name, category, arguments)
        self._device_reference = reference
        self._begin, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream = torch.cuda.current_stream(device)

    def __enter__(self) -> Self:
        self._begin.record(self._stream)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            # After an error of the device every call to it fails as well, and would replace the error.
            return
        self._end.record(self._stream)
        thread = self._recorder.thread

        def resolve() -> Event | None:
            if not self._end.query():
                return None
            start = self._device_reference.happened + self._device_reference.event.elapsed_time(self._begin) * 1e6
            duration = self._begin.elapsed_time(self._end) * 1e6
            return Event(self._name, self._category, int(start), int(duration), thread, self._arguments)

        self._recorder.add_when_known(resolve)
