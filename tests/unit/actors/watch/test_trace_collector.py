"""Collecting a trace from many, busy and failing actors; Ray is replaced by answers that the test decides on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError, RayTaskError

from actors.watch import trace as trace_module
from actors.watch.trace import COLLECT_SECONDS, TraceCollector
from rl_backend.trace.recorder import Event, TraceBatch, clock_identity, recorder
from tests.support.chrome_trace import check_trace

CLOCK = clock_identity()

type Answer = Callable[[], TraceBatch] | None


def batch(*starts: int, clock: str = CLOCK) -> TraceBatch:
    events = [Event("work", "operation", start, 1000, 0, {}) for start in starts]
    return TraceBatch(clock, time.monotonic_ns(), events, 0)


class Actor:
    """Answers what ``answer`` returns, at once; a busy one, whose ``answer`` is None, never does."""

    def __init__(self, answer: Answer = batch) -> None:
        self.answer = answer
        self.asked: list[bool] = []
        self._actor_id = id(self)
        self.take_trace = SimpleNamespace(remote=self._ask)

    def _ask(self, stop: bool) -> Any:
        self.asked.append(stop)
        return Reference(self.answer)


class Reference:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class Group:
    def __init__(self, *actors: Actor) -> None:
        self.actors = actors

    def trace_actors(self) -> dict[str, Any]:
        return {f"rank {rank}": actor for rank, actor in enumerate(self.actors)}


class AnswersAtOnce:
    """``ray``, as far as a collector uses it."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.takes = 0.0

    def wait(self, references: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        self.timeouts.append(timeout)
        ready = [reference for reference in references if reference.answer is not None][:num_returns]
        time.sleep(self.takes if len(ready) == num_returns else timeout)
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference: Any) -> TraceBatch:
        answered: TraceBatch = reference.answer()
        return answered


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnswersAtOnce]:
    made = AnswersAtOnce()
    monkeypatch.setattr(trace_module, "ray", made)
    monkeypatch.setattr(trace_module, "ray_is_usable", lambda: True)
    monkeypatch.setattr(trace_module, "START_SECONDS", 0.1)
    monkeypatch.setattr(trace_module, "CLOSE_SECONDS", 0.1)
    yield made
    recorder.stop()


def notes(path: Path, name: str) -> list[dict[str, Any]]:
    return [event["args"] for event in check_trace(path) if event["ph"] == "i" and event["name"] == name]


def test_actors_of_this_host_are_collected_with_one_wait(ray: AnswersAtOnce, tmp_path: Path) -> None:
    with TraceCollector(tmp_path / "trace.json", [Group(*(Actor() for _ in range(50)))]) as trace:
        ray.timeouts.clear()
        trace.collect()
        assert ray.timeouts == [0.0]


def test_what_was_collected_is_in_the_file_of_a_run_that_is_killed_then(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path, killed, actor = tmp_path / "trace.json", tmp_path / "killed.json", Actor()
    with TraceCollector(path, [Group(actor)]) as trace:
        for number in (1, 2):
            now = time.monotonic_ns()
            recorder.add(f"of the driver {number}", "phase", now, now + 1000, {})
            actor.answer = partial(batch, now)
            trace.collect()
            killed.write_text(f"{path.read_text()}]")
            names = [event["name"] for event in check_trace(killed)]
            assert names.count("work") == number
            assert [name for name in names if name.startswith("of the driver")] == ["of the driver 1", "of the driver 2"][
                :number
            ]


def test_slow_collecting_is_done_less_often(ray: AnswersAtOnce, tmp_path: Path) -> None:
    actor = Actor()
    with TraceCollector(tmp_path / "trace.json", [Group(actor)]) as trace:
        ray.takes = 0.1
        trace.collect()
        asked = len(actor.asked)
        time.sleep(COLLECT_SECONDS)
        trace.step(1, time.monotonic_ns(), time.monotonic_ns())
        assert len(actor.asked) == asked


def test_actors_of_another_host_are_waited_for_and_busy_ones_of_this_host_are_not(
    ray: AnswersAtOnce, tmp_path: Path
) -> None:
    here, there = Actor(), Actor(lambda: batch(clock="another host"))
    with TraceCollector(tmp_path / "trace.json", [Group(here, there)]) as trace:
        here.answer = None
        ray.timeouts.clear()
        trace.collect()
        assert ray.timeouts == [0.0]
        there.answer = None
        trace.collect()
        assert ray.timeouts[:2] == [0.0, 0.0]
        assert 0 < ray.timeouts[2] <= trace_module.PROMPT_SECONDS


def test_closing_stops_a_busy_actor_too_and_says_that_events_are_missing(ray: AnswersAtOnce, tmp_path: Path) -> None:
    busy, idle = Actor(None), Actor()
    with TraceCollector(tmp_path / "trace.json", [Group(busy, idle)]):
        pass
    assert (busy.asked, idle.asked[-1]) == ([False, True], True)
    (note,) = notes(tmp_path / "trace.json", "no more events")
    assert note["reason"] == "the process was busy when the trace was closed"


def test_events_of_before_the_trace_are_not_in_it(ray: AnswersAtOnce, tmp_path: Path) -> None:
    before = time.monotonic_ns()
    actor = Actor()
    with TraceCollector(tmp_path / "trace.json", [Group(actor)]) as trace:
        actor.answer = lambda: batch(before, before + 10**10)
        trace.collect()
        actor.answer = batch
    starts = [event["ts"] for event in check_trace(tmp_path / "trace.json") if event["name"] == "work"]
    assert len(starts) == 1 and starts[0] > 9e6


def test_busy_actors_hold_the_beginning_up_to_one_deadline(ray: AnswersAtOnce, tmp_path: Path) -> None:
    started = time.monotonic()
    with TraceCollector(tmp_path / "trace.json", [Group(Actor(None))]):
        assert 0.1 <= time.monotonic() - started < 0.4


def test_an_error_at_the_beginning_ends_the_recording_and_the_file(ray: AnswersAtOnce, tmp_path: Path) -> None:
    def fail() -> TraceBatch:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TraceCollector(tmp_path / "trace.json", [Group(Actor(fail))])
    assert not recorder.recording
    assert notes(tmp_path / "trace.json", "trace begins")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayError("the node is gone\nits id"), "RayError: the node is gone"),
        (RayTaskError("take_trace", "Traceback of the actor", ValueError("no clock")), "ValueError: no clock"),
    ],
    ids=["of Ray", "of the call"],
)
def test_an_actor_that_failed_is_asked_no_more_and_its_error_is_named(
    ray: AnswersAtOnce, tmp_path: Path, error: RayError, reason: str
) -> None:
    def fail() -> TraceBatch:
        raise error

    actor = Actor()
    with TraceCollector(tmp_path / "trace.json", [Group(actor)]) as trace:
        actor.answer = fail
        trace.collect()
        asked = len(actor.asked)
        trace.collect()
        trace.collect()
        assert len(actor.asked) == asked
    assert notes(tmp_path / "trace.json", "no more events") == [{"reason": reason}]
    assert notes(tmp_path / "trace.json", "another process") == []
