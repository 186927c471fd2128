"""Recording spans and writing them as a Chrome trace."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_backend.trace import chrome, device
from rl_backend.trace.chrome import ChromeTraceWriter, read_trace
from rl_backend.trace.recorder import CATEGORIES, Event, TraceRecorder
from tests.support.chrome_trace import check_trace


@pytest.fixture
def recorder() -> TraceRecorder:
    made = TraceRecorder()
    made.start()
    return made


def test_a_recorder_that_is_off_keeps_nothing() -> None:
    recorder = TraceRecorder()
    with recorder.span("forward", "micro_batch", tokens=3) as span:
        span.update(more=1)
    recorder.start()
    assert recorder.take() == []


def test_spans_have_times_arguments_and_the_error_that_ended_them(recorder: TraceRecorder) -> None:
    before = time.monotonic_ns()

    def fail() -> None:
        with recorder.span("outer", "operation", operation=1) as outer:
            with recorder.span("inner", "micro_batch", micro_batch=0, tokens=8):
                time.sleep(0.002)
            outer.update(weight_version=4)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    inner, outer_event = recorder.take()
    assert outer_event.arguments == {"operation": 1, "weight_version": 4, "error": "KeyError"}
    assert (inner.name, inner.category, inner.arguments) == ("inner", "micro_batch", {"micro_batch": 0, "tokens": 8})
    assert inner.duration >= 2_000_000
    assert before <= outer_event.start <= inner.start
    assert inner.start + inner.duration <= outer_event.start + outer_event.duration <= time.monotonic_ns()
    assert recorder.take() == []


def test_a_span_costs_microseconds(recorder: TraceRecorder) -> None:
    started = time.perf_counter()
    for number in range(20_000):
        with recorder.span("forward", "micro_batch", micro_batch=number, tokens=8, sequences=2):
            pass
    assert (time.perf_counter() - started) / 20_000 < 50e-6


def test_a_full_ring_drops_the_oldest_events_and_says_how_many() -> None:
    recorder = TraceRecorder()
    recorder.start(capacity=10)
    for number in range(25):
        recorder.add(str(number), "phase", 0, 1, {})
    batch = recorder.take_batch()
    assert [event.name for event in batch.events] == [str(number) for number in range(15, 25)]
    assert batch.dropped == 15
    assert recorder.take_batch().dropped == 0


def test_threads_that_record_at_once_lose_nothing_and_are_told_apart(recorder: TraceRecorder) -> None:
    together = threading.Barrier(4)

    def work() -> None:
        together.wait()
        for number in range(500):
            with recorder.span("work", "phase", number=number):
                pass
        together.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken += recorder.take()
    taken += recorder.take()
    assert len(taken) == 2000
    assert {event.thread for event in taken} == {0, 1, 2, 3}


def test_a_batch_starts_recording_and_ends_it(recorder: TraceRecorder) -> None:
    other = TraceRecorder()
    assert other.take_batch().events == []
    other.add("one", "phase", 0, 1, {})
    assert [event.name for event in other.take_batch(stop=True).events] == ["one"]
    assert not other.recording


def test_times_that_come_later_are_taken_when_they_are_known(recorder: TraceRecorder) -> None:
    recorder.add("device work", "micro_batch", 5, 9, {})
    (event,) = recorder.take()
    known: list[bool] = []
    recorder.add_when_known(lambda: event if known else None)
    assert recorder.take() == []
    known.append(True)
    assert recorder.take() == [event]


def write_steps(path: Path, steps: int) -> ChromeTraceWriter:
    writer = ChromeTraceWriter(path)
    writer.process(1, "driver")
    writer.process(2, "rank 0")
    writer.thread(2, 1, "main")
    for step in range(1, steps + 1):
        start = step * 1000.0
        writer.complete(1, 0, f"step {step}", "step", start, 900.0 + step, {"step": step})
        writer.complete(2, 1, "forward_backward", "operation", start + 100, 500, {"weight_version": step, "loss": math.nan})
        writer.complete(2, 1, "forward", "micro_batch", start + 150, 200, {"tokens": 64})
        writer.arrow(step, f"weights {step}", "weights", (1, 0, start + 10), (2, 1, start + 100))
    return writer


def test_a_trace_keeps_the_rules_of_the_format(tmp_path: Path) -> None:
    writer = write_steps(tmp_path / "trace.json", 3)
    writer.instant(2, "events dropped", "trace", 3.0, {"events": 4})
    writer.close()
    writer.close()
    events = check_trace(tmp_path / "trace.json")
    assert [event["args"]["loss"] for event in events if event["name"] == "forward_backward"] == ["nan"] * 3
    assert {event["cat"] for event in events if event["ph"] == "X"} <= set(CATEGORIES)
    ChromeTraceWriter(tmp_path / "empty.json").close()
    assert check_trace(tmp_path / "empty.json") == []


def test_arguments_that_json_lacks_are_numbers_or_text(tmp_path: Path) -> None:
    arguments = {
        "tokens": np.int64(3),
        "rate": np.float32(0.5),
        "wide": np.longdouble(2),
        "loss": torch.tensor(4.0),
        "gone": torch.tensor(math.nan),
        "rows": torch.zeros(2),
        "path": Path("a/b"),
        "several": [math.nan, {"deep": (np.bool_(True), -math.inf)}],
        "numbered": {1: None, (2, 3): {4}},
    }
    writer = ChromeTraceWriter(tmp_path / "trace.json")
    writer.process(1, "driver")
    writer.complete(1, 0, "x", "phase", 0.0, 1.0, arguments)
    writer.close()
    assert check_trace(tmp_path / "trace.json")[-1]["args"] == {
        "tokens": 3,
        "rate": 0.5,
        "wide": "2.0",
        "loss": 4.0,
        "gone": "nan",
        "rows": "tensor([0., 0.])",
        "path": "a/b",
        "several": ["nan", {"deep": [True, "-inf"]}],
        "numbered": {"1": None, "(2, 3)": "{4}"},
    }


def test_a_span_on_a_cpu_has_its_arguments_and_the_error_that_ended_it(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "recorder", recorder)
    with device.device_span(torch.device("cpu"), "forward", "micro_batch", micro_batch=2, tokens=40, sequences=3):
        time.sleep(0.001)
    with pytest.raises(KeyError), device.device_span(torch.device("cpu"), "backward", "micro_batch", stage=1):
        raise KeyError
    forward, backward = recorder.take()
    assert forward[:2] == ("forward", "micro_batch") and forward.duration >= 1_000_000
    assert forward.arguments == {"micro_batch": 2, "tokens": 40, "sequences": 3}
    assert backward[:2] == ("backward", "micro_batch")
    assert backward.arguments == {"stage": 1, "error": "KeyError"}


class TimedEvent:
    """A CUDA event that happens a millisecond after the one before."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: object) -> None:
        TimedEvent.made += 1
        self.at = float(TimedEvent.made)

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: TimedEvent) -> float:
        return later.at - self.at


def test_a_span_on_a_gpu_is_timed_by_the_device_and_has_its_arguments(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedEvent, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(device, "recorder", recorder)
    reference = TimedEvent(enable_timing=True)
    monkeypatch.setattr(device, "_reference", lambda _: (reference, 5_000_000))
    for micro_batch in range(2):
        with device.device_span(torch.device("cuda", 1), "forward", "micro_batch", micro_batch=micro_batch, tokens=40):
            pass
    found = [(event.start, event.duration, event.arguments) for event in recorder.take()]
    assert found == [
        (6_000_000, 1_000_000, {"micro_batch": 0, "tokens": 40, "device": "cuda:1"}),
        (8_000_000, 1_000_000, {"micro_batch": 1, "tokens": 40, "device": "cuda:1"}),
    ]


class DeviceEvent:
    """A CUDA event, of a device on which a kernel fails."""

    lost = False

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: unspecified launch failure")


def test_an_error_on_a_device_is_not_replaced_by_that_of_its_span(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(device, "recorder", recorder)
    monkeypatch.setattr(device, "_reference", lambda _: (DeviceEvent(), 0))

    def fail() -> None:
        with device.device_span(torch.device("cuda", 0), "forward", "micro_batch"):
            monkeypatch.setattr(DeviceEvent, "lost", True)
            raise ValueError("the body's own")

    with pytest.raises(ValueError, match="the body's own"):
        fail()
    assert recorder.take() == []


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_steps(path, 20).close()
    whole = read_trace(path)
    path.write_bytes(path.read_bytes()[:-200])
    assert 0 < len(whole) - len(read_trace(path)) < 5
    assert read_trace(path)[:-1] == whole[: len(read_trace(path)) - 1]


def test_a_trace_ends_at_its_size_and_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "MAX_BYTES", 2000)
    path = tmp_path / "trace.json"
    writer = ChromeTraceWriter(path)
    for number in range(100):
        writer.complete(1, 1, "phase", "phase", float(number), 1.0, {})
    writer.close()
    events = json.loads(path.read_text())
    assert path.stat().st_size < 2200
    assert events[-1]["name"] == "trace full"
    assert events[-1]["args"]["events_not_written"] == 100 - (len(events) - 1)


def test_an_end_forgets_events_threads_and_times_that_are_not_known_yet() -> None:
    recorder = TraceRecorder()
    recorder.start(capacity=1)
    other = threading.Thread(target=lambda: recorder.add("other", "phase", 0, 1, {}))
    other.start()
    other.join()
    recorder.add("mine", "phase", 0, 1, {})
    (event,) = recorder.take()
    assert (event.name, event.thread) == ("mine", 1), "the other's has been dropped"
    recorder.add_when_known(lambda: event)
    recorder.stop()
    recorder.add("off", "phase", 0, 1, {})
    recorder.add_when_known(lambda: event)
    assert recorder.take() == []
    recorder.start()
    recorder.add("again", "phase", 0, 1, {})
    batch = recorder.take_batch()
    assert [(each.name, each.thread) for each in batch.events] == [("again", 0)] and batch.dropped == 0


def test_times_that_come_later_keep_their_order_and_the_oldest_are_dropped_beyond_the_ring() -> None:
    recorder = TraceRecorder()
    recorder.start(capacity=2)
    recorder.add("work", "micro_batch", 5, 9, {})
    (event,) = recorder.take()
    known: set[int] = set()

    def later(number: int) -> Callable[[], Event | None]:
        return lambda: event._replace(start=number) if number in known else None

    for number in range(3):
        recorder.add_when_known(later(number))
    known.add(2)
    assert recorder.take() == [], "the one before it is not known yet"
    known.update((0, 1))
    batch = recorder.take_batch()
    assert [each.start for each in batch.events] == [1, 2] and batch.dropped == 1


class PendingEvent(TimedEvent):
    """One that happens when the device gets there."""

    there = False

    def query(self) -> bool:
        return self.there


def test_a_span_on_a_gpu_is_known_when_it_has_happened_and_is_of_the_thread_that_began_it(
    recorder: TraceRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimedEvent, "made", 0)
    monkeypatch.setattr(torch.cuda, "Event", PendingEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(device, "recorder", recorder)
    monkeypatch.setattr(device, "_reference", lambda _: (TimedEvent(enable_timing=True), 0))
    recorder.add("mine", "phase", 0, 1, {})

    def run() -> None:
        with device.device_span(torch.device("cuda", 0), "forward", "micro_batch"):
            pass

    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert [event.name for event in recorder.take()] == ["mine"]
    monkeypatch.setattr(PendingEvent, "there", True)
    assert [(event.name, event.thread) for event in recorder.take()] == [("forward", 1)]


def test_nothing_is_asked_of_a_gpu_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked")

    off = TraceRecorder()
    ran: list[int] = []
    monkeypatch.setattr(device, "recorder", off)
    monkeypatch.setattr(torch.cuda, "Event", refuse)
    monkeypatch.setattr(device, "_reference", refuse)
    with device.device_span(torch.device("cuda", 0), "forward", "micro_batch"):
        ran.append(1)
    assert ran == [1] and off.take() == []


def test_the_clock_of_a_device_is_placed_again_when_it_is_old_and_each_device_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, object]] = []

    class Placed:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            said.append(("record", stream))

        def synchronize(self) -> None:
            said.append(("wait", None))

    now = [100]
    monkeypatch.setattr(torch.cuda, "Event", Placed)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append(("all", str(device))))
    monkeypatch.setattr(device, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    monkeypatch.setattr(device, "_references", {})
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    event, happened = device._reference(first)
    assert happened == 100 and said == [("all", "cuda:0"), ("record", "stream of cuda:0"), ("wait", None)]
    now[0] += device.REFERENCE_NS
    assert device._reference(first) == (event, 100) and len(said) == 3, "it is exact for so long"
    assert device._reference(second)[0] is not event and device._reference(second)[1] == now[0]
    now[0] += 1
    again, happened = device._reference(first)
    assert again is not event and happened == now[0]
    assert device._reference(second)[1] == now[0] - 1 and len(said) == 9


def test_what_follows_a_full_trace_is_not_written_however_short_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chrome, "MAX_BYTES", 600)
    writer = ChromeTraceWriter(tmp_path / "trace.json")
    for name in ("first", "x" * 600, "last"):
        writer.complete(1, 1, name, "phase", 0.0, 1.0, {})
    writer.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    assert [event["name"] for event in events] == ["first", "trace full"]
    assert events[-1]["args"] == {"events_not_written": 2}


def test_events_have_their_places_and_are_read_before_the_end(tmp_path: Path) -> None:
    writer = ChromeTraceWriter(tmp_path / "trace.json")
    writer.process(3, "rank 2")
    writer.thread(3, 4, "main")
    writer.instant(3, "lost", "trace", 2.00049, {"events": 1})
    writer.complete(3, 4, "x", "phase", 1.23456, 7.00051, {})
    writer.arrow(9, "weights", "weights", (1, 0, 2.0), (3, 4, 5.0))
    writer.flush()
    named = {"ph": "M", "pid": 3}
    assert read_trace(tmp_path / "trace.json") == [
        {"name": "process_name", **named, "tid": 0, "args": {"name": "rank 2"}},
        {"name": "process_sort_index", **named, "tid": 0, "args": {"sort_index": 3}},
        {"name": "thread_name", **named, "tid": 4, "args": {"name": "main"}},
        {"name": "thread_sort_index", **named, "tid": 4, "args": {"sort_index": 4}},
        {"name": "lost", "cat": "trace", "ph": "i", "ts": 2.0, "pid": 3, "tid": 0, "s": "p", "args": {"events": 1}},
        {"name": "x", "cat": "phase", "ph": "X", "ts": 1.235, "pid": 3, "tid": 4, "dur": 7.001, "args": {}},
        {"name": "weights", "cat": "weights", "ph": "s", "ts": 2.0, "pid": 1, "tid": 0, "id": 9},
        {"name": "weights", "cat": "weights", "ph": "f", "ts": 5.0, "pid": 3, "tid": 4, "id": 9, "bp": "e"},
    ]
    writer.close()
    (tmp_path / "broken.json").write_bytes(b'[\n{"a":1},\n{"b":\n{"c":2}\n')
    assert read_trace(tmp_path / "broken.json") == [{"a": 1}, {"c": 2}]
