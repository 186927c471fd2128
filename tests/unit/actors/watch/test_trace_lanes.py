"""What a trace shows: a lane for each actor, one clock for all hosts, and arrows from pushes to what samples with them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.watch import trace as trace_module
from actors.watch.trace import TraceCollector
from rl_backend.contracts import ConfigError
from rl_backend.trace.recorder import Event, TraceBatch, recorder
from tests.support.chrome_trace import check_trace
from tests.unit.actors.watch.test_trace_collector import CLOCK, Actor, AnswersAtOnce, Group, batch, notes, ray

__all__ = ["ray"]
SECOND = 10**9


def spans(path: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in check_trace(path) if event["ph"] == "X" and event["name"] == name]


def names_of_processes(path: Path) -> dict[int, str]:
    events = [event for event in check_trace(path) if event["name"] == "process_name"]
    return {event["pid"]: event["args"]["name"] for event in events}


def event(name: str, category: str, start: int, *, version: int | None = None, thread: int = 0, **more: Any) -> Event:
    arguments = more if version is None else {"weight_version": version, **more}
    return Event(name, category, start, 2_000_000, thread, arguments)


def test_actors_of_every_group_have_lanes_of_their_own(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first, second = Group(Actor(), Actor()), Group(Actor())
    with TraceCollector(path, [first, second, first]) as trace:
        now = time.monotonic_ns()
        for number, actor in enumerate((*first.actors, *second.actors)):
            actor.answer = lambda number=number: TraceBatch(
                CLOCK, now, [event(f"work {number}", "operation", now, thread=number)], 0
            )
        trace.collect()
        trace.step(7, now, now + 5000)
    found = names_of_processes(path)
    assert list(found.values())[:4] == ["driver", "rank 0", "rank 1", "rank 0 of group 2"] and sorted(found) == [
        *range(1, 7)
    ]
    assert list(found.values())[4:] == ["rank 0 of group 3", "rank 1 of group 2"]
    for number in range(3):
        for span in spans(path, f"work {number}"):
            assert found[span["pid"]].startswith(("rank 0", "rank 1", "rank 0 of group 2")[number])
            assert span["tid"] == number + 1
    threads = {
        (each["pid"], each["tid"]): each["args"]["name"] for each in check_trace(path) if each["name"] == "thread_name"
    }
    assert threads[1, 0] == "steps" and threads[2, 1] == "main" and threads[3, 2] == "thread 2"
    (step,) = spans(path, "step 7")
    assert (step["pid"], step["tid"], step["dur"], step["args"]) == (1, 0, 5.0, {"step": 7})


def test_times_of_another_host_are_moved_by_the_difference_of_its_clock(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ahead, here = Actor(), Actor()
    begun: list[int] = []

    def of_other_host() -> TraceBatch:
        now = time.monotonic_ns()
        begun.append(now)
        return TraceBatch(
            "another host", now + 500 * SECOND, [event("there", "operation", now + 500 * SECOND, thread=len(begun))], 0
        )

    ahead.answer = of_other_host
    with TraceCollector(path, [Group(here, ahead)]) as trace:
        epoch = trace._epoch
        trace.collect()
    found = spans(path, "there")
    assert len(found) == len(begun) >= 9
    assert [span["ts"] for span in found] == pytest.approx([(now - epoch) / 1000 for now in begun], abs=5e6)
    (note,) = notes(path, "clocks of other hosts")
    assert note["hosts"] == 1 and 0 < note["error_ms"] < 5000


def test_a_better_measurement_of_a_clock_replaces_a_worse_one_and_an_old_one_is_worth_less(
    ray: AnswersAtOnce, tmp_path: Path
) -> None:
    with TraceCollector(tmp_path / "trace.json", []) as trace:

        def measured(now: int, sent: int, received: int) -> tuple[float, float]:
            trace._measure(TraceBatch("there", now, [], 0), sent, received)
            return trace._clocks["there"].offset, trace._clocks["there"].error

        assert measured(1000, 100, 300) == (800, 100)
        assert measured(2000, 300, 700) == (800, 100), "half of a longer round trip is worse"
        assert measured(3000, 800, 900) == (2150, 50)
        # 40 seconds later the old measurement may be wrong by two milliseconds more.
        later = 900 + 40 * SECOND
        assert measured(later, later - 5_000_000, later) == (2150, 50)
        assert measured(later + 7, later - 4_000_000, later) == (2_000_007, 2_000_000)


def test_arrows_go_from_a_push_to_its_loads_and_from_a_load_to_what_samples_with_it(
    ray: AnswersAtOnce, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    engines = Actor(), Actor()
    with TraceCollector(path, [Group(*engines)]) as trace:
        start = time.monotonic_ns()

        def at(milliseconds: int) -> int:
            return start + 1_000_000 * milliseconds

        def answers(*events: Event) -> TraceBatch:
            return TraceBatch(CLOCK, start, [*events], 0)

        first = [event("finish update", "weights", at(10), version=3), event("generate", "rollout", at(20), version=3)]
        others = [
            event("finish update", "weights", at(14), version=3, error="KeyError"),
            event("generate", "rollout", at(24), version=3),
            event("begin update", "weights", at(28), version=4),
        ]
        engines[0].answer, engines[1].answer = lambda: answers(*first), lambda: answers(*others)
        trace.collect()  # the push is not known yet
        engines[0].answer = lambda: answers(event("generate", "rollout", at(40), version=2))
        engines[1].answer = lambda: answers(event("generate", "rollout", at(44), version=4))
        for name, version, place in (("load", 3, 1), ("plan", 3, 4), ("stream", 4, 7)):
            recorder.add(name, "push", at(place), at(place + 2), {"weight_version": version})
        trace.collect()
        for engine in engines:
            engine.answer = batch
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for each in check_trace(path):
        if each["ph"] in "sf":
            arrows.setdefault(each["id"], {})[each["ph"]] = each
    found = [
        (each["s"]["name"], (each["s"]["pid"], each["f"]["pid"]), round((each["f"]["ts"] - each["s"]["ts"]) / 1000))
        for each in arrows.values()
    ]
    assert found == [("weights 3", (2, 2), 9), ("weights 3", (1, 2), 10)]


def test_events_that_a_ring_had_no_room_for_are_said(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path, actor = tmp_path / "trace.json", Actor()
    with TraceCollector(path, [Group(actor)]) as trace:
        actor.answer = lambda: TraceBatch(CLOCK, time.monotonic_ns(), [], 12)
        trace.collect()
        actor.answer = batch
    assert notes(path, "events dropped") == [{"events": 12}]


def test_an_actor_that_another_takes_the_place_of_has_its_lane_from_then_on(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path, group = tmp_path / "trace.json", Group(Actor(), Actor())
    with TraceCollector(path, [group]) as trace:

        def fail() -> TraceBatch:
            raise RayError("gone")

        group.actors[1].answer = fail
        trace.collect()
        trace.collect()
        assert notes_so_far(path, "another process") == 0
        new = Actor(lambda: batch(time.monotonic_ns()))
        group.actors = (group.actors[0], new)
        trace.collect()
        assert len(new.asked) == 1
    assert list(names_of_processes(path).values()) == ["driver", "rank 0", "rank 1"]
    assert {span["pid"] for span in spans(path, "work")} == {3}
    (replaced,) = [each for each in check_trace(path) if each["name"] == "another process"]
    (lost,) = [each for each in check_trace(path) if each["name"] == "no more events"]
    assert (replaced["pid"], lost["pid"], lost["args"]) == (3, 3, {"reason": "RayError: gone"})


def notes_so_far(path: Path, name: str) -> int:
    return path.read_text().count(f'"name":"{name}"')


def test_a_busy_actor_is_asked_once_and_its_late_answer_is_taken(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path, actor = tmp_path / "trace.json", Actor()
    with TraceCollector(path, [Group(actor)]) as trace:
        asked = len(actor.asked)
        actor.answer = None
        for _ in range(3):
            trace.collect()
        assert len(actor.asked) == asked + 1
        (lane,) = trace._lanes.values()
        late = time.monotonic_ns()
        lane.reference.answer = lambda: batch(late)
        actor.answer = batch
        trace.collect()
    assert len(spans(path, "work")) == 1


def test_every_actor_that_is_too_busy_to_end_is_named(ray: AnswersAtOnce, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    group = Group(Actor(None), Actor(), Actor(None))
    trace = TraceCollector(path, [group])
    trace.close()
    written = path.read_text()
    trace.close()
    assert path.read_text() == written and not recorder.recording
    ended = [each["pid"] for each in check_trace(path) if each["name"] == "no more events"]
    assert ended == [2, 4]
    assert [actor.asked[-1] for actor in group.actors] == [True] * 3


def test_without_ray_a_trace_ends_with_what_the_driver_did(
    ray: AnswersAtOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, actor = tmp_path / "trace.json", Actor()
    with TraceCollector(path, [Group(actor)]):
        monkeypatch.setattr(trace_module, "ray_is_usable", lambda: False)
        now = time.monotonic_ns()
        recorder.add("last", "phase", now, now + 1000, {})
    assert len(spans(path, "last")) == 1 and True not in actor.asked


def test_one_trace_at_a_time_is_recorded_in_a_process(ray: AnswersAtOnce, tmp_path: Path) -> None:
    with TraceCollector(tmp_path / "trace.json", []):
        with pytest.raises(ConfigError, match=r"trace='\S+other\.json': this process records another trace already"):
            TraceCollector(tmp_path / "other.json", [])
        assert recorder.recording and not (tmp_path / "other.json").exists()


def test_only_so_many_pushes_and_loads_are_remembered(
    ray: AnswersAtOnce, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "KEPT_PUSHES", 2)
    path, engine = tmp_path / "trace.json", Actor()
    with TraceCollector(path, [Group(engine)]) as trace:
        now = time.monotonic_ns()
        for version in (1, 2, 3):
            begin = now + version * 10_000_000
            recorder.add("load", "push", begin, begin + 1_000_000, {"weight_version": version})
        trace.collect()
        loads = [event("finish update", "weights", now + (50 + 5 * each) * 1_000_000, version=each) for each in (1, 2, 3)]
        engine.answer = lambda: TraceBatch(CLOCK, now, loads, 0)
        trace.collect()
        engine.answer = batch
    assert [each["name"] for each in check_trace(path) if each["ph"] == "s"] == ["weights 2", "weights 3"]
