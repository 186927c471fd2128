"""Spans of work on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from rl_backend.trace.device import device_span
from rl_backend.trace.recorder import recorder

pytestmark = pytest.mark.gpu

CLOCK_NS = 2_000_000
"""How far a device's times may be from the host's."""


def test_a_span_is_of_the_work_on_the_device_and_not_of_its_launch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randn(4096, 4096, device=device)
    torch.mm(matrix, matrix)
    recorder.start()
    try:
        with device_span(device, "warm-up", "micro_batch"):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)
        recorder.take()
        started = time.monotonic_ns()
        for micro_batch in range(2):
            with device_span(device, "forward", "micro_batch", micro_batch=micro_batch):
                for _ in range(40):
                    torch.mm(matrix, matrix)
        launched = time.monotonic_ns()
        torch.cuda.synchronize(device)
        ended = time.monotonic_ns()
        first, second = recorder.take()
    finally:
        recorder.stop()
    assert [event.arguments["micro_batch"] for event in (first, second)] == [0, 1]
    assert first.duration + second.duration > 0.5 * (ended - started)
    assert second.start + second.duration > launched
    assert started - CLOCK_NS <= first.start
    assert first.start + first.duration <= second.start + CLOCK_NS
    assert second.start + second.duration <= ended + CLOCK_NS
