"""Heartbeats of engines: those that answer, are late and busy, are stopped, hang, or say what is wrong with them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig
from actors.rollout.group import heartbeats as module
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.heartbeats import LATE_BEATS, Heartbeats, ending_stopped, remains_stopped
from actors.rollout.messages import STOPPED_LOOKS
from actors.wire.segment import host_identity
from rl_backend.contracts import EngineDeadError, EngineDirtyError
from tests.support.actors_in_process import Actor, Call, RayInProcess, until, use


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayInProcess:
    return use(monkeypatch, *(f"actors.rollout.group.{name}" for name in ("heartbeats", "engines", "calls")))


@pytest.fixture
def child() -> Iterator[Process]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield Process.of(process.pid)
        process.kill()


class Engines:
    """Engine 0, which lives and answers, and engine 1, of the process and answers given."""

    def __init__(self, process: Process | None = None, **answers: Any) -> None:
        process = process or Process(1, "")
        config = RolloutConfig(model_path="x", num_engines=2, heartbeat_timeout=20.0)
        info: Any = SimpleNamespace(pid=process.pid, started=process.started, host=host_identity(), name="engine 1")
        self.actors = [Actor("actor 0"), Actor("actor 1", answers)]
        self.set = EngineSet(config)
        self.set.add(dict(enumerate(self.actors)), {0: info, 1: info})
        self.beats = Heartbeats(self.set)

    def beat(self, times: int) -> dict[int, Any]:
        for _ in range(times):
            self.beats.beat()
        return self.set.lost_engines


def test_engines_are_asked_at_every_beat_beside_what_else_they_do(ray: RayInProcess) -> None:
    engines = Engines()
    assert not engines.beat(5)
    for actor in engines.actors:
        assert actor.asked == [("pulse",)] * 5 and actor.options == {"pulse": {"concurrency_group": "pulse"}}
    engines.set.add({1: Actor("another")}, {1: engines.set.infos[1]}, lack_weights=True)
    engines.actors[1].asked.clear()
    engines.beat(2)
    assert not engines.actors[1].asked and len(engines.set._actors[1].asked) == 2, "the new one, without weights too"


@pytest.mark.parametrize("outcome", ["died", "dirty", "not yet"])
def test_what_became_of_the_process_before_is_not_noted_of_the_engine_in_its_place(ray: RayInProcess, outcome: str) -> None:
    engines, another = Engines(), Actor("another")
    engines.actors[1].silent.add("pulse")
    engines.beat(1)
    engines.set.add({1: another}, {1: engines.set.infos[1]})
    if outcome != "not yet":
        died, dirty = ActorDiedError(), RayTaskError("pulse", "", EngineDirtyError("it is dirty"))
        engines.actors[1].open[-1].answer(died if outcome == "died" else dirty)
    assert not engines.beat(3) and not ray.killed
    assert another.asked == [("pulse",)] * 3


@pytest.mark.parametrize("error", [EngineDirtyError("it is dirty"), EngineDeadError("a worker ended")])
def test_what_an_engine_says_of_itself_is_noted_at_the_next_beat(ray: RayInProcess, error: Exception) -> None:
    engines = Engines(pulse=error)
    lost = engines.beat(2)
    assert list(lost) == [1] and isinstance(lost[1], EngineDeadError | EngineDirtyError)
    assert ray.killed == ([] if isinstance(error, EngineDirtyError) else ["actor 1"])


def test_an_engine_whose_process_ended_is_noted_at_the_next_beat(ray: RayInProcess) -> None:
    engines = Engines()
    engines.actors[1].silent.add("pulse")
    engines.beat(2)
    engines.actors[1].open[-1].answer(ActorDiedError())
    assert "engine 1 is dead: its process ended" in str(engines.beat(1)[1]) and ray.killed == ["actor 1"]


def test_a_stopped_process_is_dead_within_seconds_and_ended(ray: RayInProcess, child: Process) -> None:
    engines = Engines(child)
    engines.beat(1)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: child.is_stopped)
    engines.actors[1].silent.add("pulse")
    engines.beat(1)
    assert not engines.beat(LATE_BEATS + STOPPED_LOOKS - 2) and not child.has_ended
    lost = engines.beat(1)
    assert list(lost) == [1] and f"process {child.pid} has been stopped (SIGSTOP" in str(lost[1])
    assert lost[1].details == {"engine": "engine 1", "hung": True} and ray.killed == ["actor 1"]
    until(lambda: child.has_ended)


def test_a_busy_process_has_the_whole_time_and_one_that_was_stopped_for_a_moment_too(
    ray: RayInProcess, child: Process
) -> None:
    engines = Engines(child)
    engines.actors[1].silent.add("pulse")
    for number in (signal.SIGSTOP, signal.SIGCONT) * 6:
        os.kill(child.pid, number)
        until(lambda number=number: child.is_stopped == (number == signal.SIGSTOP))  # type: ignore[misc]
        assert not engines.beat(2)
    assert not engines.beat(8)
    engines.actors[1].open[-1].answer(None)
    assert not engines.beat(40)
    lost = engines.beat(1)
    assert "has not answered a heartbeat for 20 s (RolloutConfig.heartbeat_timeout)" in str(lost[1])
    until(lambda: child.has_ended)


def test_a_process_is_looked_at_before_it_is_ended(child: Process) -> None:
    waits: list[float] = []
    assert not remains_stopped(child, waits.append) and not waits
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: child.is_stopped)
    assert remains_stopped(child, waits.append) and len(waits) == STOPPED_LOOKS and not child.has_ended


def test_a_process_that_is_stopped_before_its_engine_has_a_heartbeat_is_ended(
    child: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    with ending_stopped([child]):
        time.sleep(0.1)
        assert not child.has_ended
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: child.has_ended)


def test_a_process_that_is_stopped_later_is_not(child: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    with ending_stopped([child]):
        pass
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(0.15)
    assert child.is_stopped


class Elsewhere:
    """Another node: the tasks that look at a process there, or end it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks: list[Call] = []
        self.asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr(module, "call_on_node", self._call)

    def _call(self, node_id: str, function: Any, process: Process) -> Call:
        self.asked.append((node_id, function.__name__, process))
        self.looks.append(Call(done=False))
        return self.looks[-1]


@pytest.mark.parametrize("answer", [False, ActorDiedError()], ids=["runs", "no answer"])
def test_a_process_of_another_node_is_looked_at_there_and_ended_there(
    ray: RayInProcess, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    elsewhere, process = Elsewhere(monkeypatch), Process(4711, "99")
    engines = Engines(process)
    info: Any = engines.set.infos[1]
    info.host, info.node_id = "another host", "node b"
    engines.actors[1].silent.add("pulse")
    assert not engines.beat(LATE_BEATS) and not elsewhere.asked
    assert not engines.beat(3)
    look = ("node b", "remains_stopped", process)
    assert elsewhere.asked == [look], "one look at a time"
    for number in range(STOPPED_LOOKS + 1):
        elsewhere.looks[-1].answer(answer)
        assert not engines.beat(2), "it runs, or nobody knows: it is looked at again"
        assert elsewhere.asked == [look] * (number + 2)
    elsewhere.looks[-1].answer(True)
    lost = engines.beat(1)
    assert f"its process {process.pid} has been stopped" in str(lost[1]) and ray.killed == ["actor 1"]
    assert elsewhere.asked[-1] == ("node b", "kill", process)


def test_each_of_several_processes_that_start_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.02)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        processes = [Process.of(child.pid) for child in children]
        with ending_stopped(processes):
            os.kill(processes[1].pid, signal.SIGSTOP)
            until(lambda: processes[1].has_ended)
        assert not processes[0].has_ended
    finally:
        for child in children:
            child.kill()
            child.wait()
