"""Engines that die, are stopped or lose a worker in the middle of a run: they are replaced, and the run is the same."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group import heartbeats
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import RolloutGroup
from actors.rollout.group.healing import EngineEvent
from actors.run import RunResult
from actors.run.session import Session
from actors.sync.push import WeightSync
from actors.sync.staged_transports import TransportName
from actors.wire.segment import shared_files
from examples import grpo
from rl_backend.contracts import EngineDeadError
from tests.support.engines import GroupOfWorkers, GroupWithoutVllm
from tests.support.rollout import ReferenceTrainer
from tests.support.runs import differences, of_the_run

LAST = 4
PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [9, 8, 7], [44]]
LONG = SamplingConfig(max_new_tokens=150)
TOLERANCE = 1e-5


class Heard:
    """The events of a group, and when they came."""

    def __init__(self, group: RolloutGroup) -> None:
        self.events: list[tuple[EngineEvent, float]] = []
        group.healing.listeners.append(lambda event: self.events.append((event, time.monotonic())))

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event, _ in self.events]

    def wait(self, kind: str, seconds: float = 180.0) -> float:
        until(lambda: kind in self.kinds, seconds)
        return next(when for event, when in self.events if event.kind == kind)


def until(true: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def process_of(group: RolloutGroup, engine: int) -> Process:
    return Process(group.infos[engine].pid, group.infos[engine].started)


def is_sampling(group: RolloutGroup, engine: int) -> bool:
    return group.turns.in_flight.get(engine, 0) > 0


class StopEarlyError(Exception):
    """Ends a run whose schedule depends on the number of its steps."""


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [of_the_run(line) for line in found if line["step"] <= LAST]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
@pytest.mark.shows(
    "engines: kill -9 of one of two engines while a GRPO run samples: it is replaced, and the run's samples and metrics are "
    "those of an undisturbed one; make test-all also stops it by SIGSTOP"
)
def test_a_run_whose_engine_is_lost_while_it_samples_is_the_run_that_it_would_have_been(
    learned: tuple[RunResult, Path],
    demo_session: Session,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    rollout, undisturbed = demo_session.rollout, learned[1]
    assert rollout is not None
    heard, old, began = Heard(rollout), process_of(rollout, 1), [0.0]

    def disturb() -> None:
        until(lambda: is_sampling(rollout, 1))
        began[0] = time.monotonic()
        os.kill(old.pid, number)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            threading.Thread(target=disturb).start()
        if step == LAST - 1:
            heard.wait("replaced")
        if step == LAST:
            raise StopEarlyError

    settings = json.loads((undisturbed / "config.json").read_text()) | {"run_dir": str(tmp_path / "run"), "trace": False}
    with pytest.raises(StopEarlyError):
        grpo.train(grpo.GRPOConfig(**settings), demo_session, on_step)
    kind = "died" if number == signal.SIGKILL else "hung"
    assert heard.kinds == [kind, "replaced"] and heard.events[0][1] - began[0] < 10
    assert old.has_ended and process_of(rollout, 1) != old and rollout.engines == (0, 1)
    files = ("samples.jsonl", "metrics.jsonl", "held_out.jsonl")
    found, wanted = ({name: lines(folder, name) for name in files} for folder in (tmp_path / "run", undisturbed))
    assert all(found.values()) and differences(found, wanted) == []
    events = Counter[str]()
    for line in found["metrics.jsonl"]:
        events.update({name: value for name, value in line.items() if name.startswith("engines/")})
    assert events.pop("engines/seconds_lost") > 0 and dict(events) == {f"engines/{kind}": 1, "engines/replaced": 1}
    told = capsys.readouterr().out
    assert "warning: engine 1 is dead: its process" in told and "engine 1 was replaced after" in told


@pytest.fixture(scope="module")
def trainer(untied_model: Path) -> ReferenceTrainer:
    return ReferenceTrainer(untied_model)


def config(model: Path, **settings: Any) -> RolloutConfig:
    return RolloutConfig(
        model_path=str(model), device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.25, **settings
    )


@pytest.mark.long
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("method", ["verify", "load", "resume"])
@pytest.mark.shows("engines: kill -9 at each step of a push leaves whole versions, old or new, and the push completes")
def test_an_engine_that_is_killed_in_a_push_is_replaced_and_all_serve_the_new_weights(
    ray_cluster: None,
    untied_model: Path,
    trainer: ReferenceTrainer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    transport: TransportName,
) -> None:
    with (
        RolloutGroup(config(untied_model, num_engines=2)) as group,
        WeightSync(trainer.source, group, transport=transport) as sync,
    ):
        sync.push()
        heard, start_call, killed = Heard(group), EngineSet.start_call, []

        def killing(engines: EngineSet, called: str, *args: Any, **options: Any) -> dict[int, Any]:
            calls = start_call(engines, called, *args, **options)
            if called == method and not killed:
                killed.append(process_of(group, 1).pid)
                os.kill(killed[0], signal.SIGKILL)
            return calls

        monkeypatch.setattr(EngineSet, "start_call", killing)
        trainer.advance()
        version = sync.push().version
        assert killed and version == trainer.source.version
        samples = group.generate(PROMPTS, LONG)
        assert {each for sample in samples for each in sample.weight_versions} == {version}
        heard.wait("replaced")
        samples = group.generate(PROMPTS, LONG)
        assert {sample.engine for sample in samples} == {0, 1}
        assert {each for sample in samples for each in sample.weight_versions} == {version}
        assert trainer.mean_gap(samples) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.shows("engines: one of two workers of the only engine that ends or is stopped costs the engine, not the run")
def test_an_engine_whose_worker_is_lost_is_replaced_and_answers_what_it_was_asked(
    ray_cluster: None, untied_model: Path, trainer: ReferenceTrainer, number: int
) -> None:
    with (
        GroupOfWorkers(config(untied_model, tensor_parallel=2)) as group,
        WeightSync(trainer.source, group) as sync,
    ):
        version = sync.push().version
        expected = group.generate(PROMPTS, LONG, seeds=range(4))
        heard, old = Heard(group), process_of(group, 0)
        workers: list[Process] = group.engine_set.call("worker_processes")[0]
        assert len(workers) == 2
        # A process that is killed does not remove them.
        names = {path.name for process in [old, *workers] for path in shared_files(process.pid)}
        assert all(name.startswith("rl_backend") for name in names)
        pending = group.submit(PROMPTS, LONG, seeds=range(4))
        time.sleep(0.3)
        began = time.monotonic()
        os.kill(workers[1].pid, number)
        samples = pending.result(300.0)
        lost, replaced = heard.wait("died" if number == signal.SIGKILL else "hung"), heard.wait("replaced")
        assert lost - began < 10 and replaced > lost
        assert [each.response_ids for each in samples] == [each.response_ids for each in expected]
        assert {each for sample in samples for each in sample.weight_versions} == {version}
        until(lambda: all(process.has_ended for process in [old, *workers]))


def assert_that_a_stopped_engine_is_replaced(group: RolloutGroup, seconds: float) -> None:
    heard, old = Heard(group), process_of(group, 1)
    pending = group.submit([[1], [2]], SamplingConfig(max_new_tokens=1))
    busy = group.engine_set.living()[0].hold_gil.remote(8.0)
    began = time.monotonic()
    os.kill(old.pid, signal.SIGSTOP)
    assert heard.wait("hung") - began < seconds
    assert len(pending.result()) == 2
    heard.wait("replaced")
    until(lambda: old.has_ended)
    assert heard.kinds == ["hung", "replaced"] and group.engines == (0, 1)
    assert busy is not None and "stopped (SIGSTOP" in heard.events[0][0].reason


@pytest.mark.parametrize("host", ["here", pytest.param("another", marks=pytest.mark.long)])
def test_a_stopped_engine_is_ended_within_seconds_and_a_busy_one_is_not(
    ray_cluster: None, untied_model: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    if host == "another":  # a task looks at the process there, and processes of other lanes slow it
        monkeypatch.setattr(heartbeats, "host_identity", lambda: "another host")
    with GroupWithoutVllm(config(untied_model, num_engines=2)) as group:
        assert_that_a_stopped_engine_is_replaced(group, 20 if host == "here" else 60)


@pytest.mark.long
def test_an_engine_that_is_lost_again_and_again_ends_the_run_with_what_happened(
    ray_cluster: None, untied_model: Path
) -> None:
    with GroupWithoutVllm(config(untied_model, num_engines=2, max_restarts=1)) as group:
        heard = Heard(group)
        os.kill(process_of(group, 1).pid, signal.SIGKILL)
        heard.wait("replaced")
        os.kill(process_of(group, 1).pid, signal.SIGKILL)
        until(lambda: heard.kinds == ["died", "replaced", "died"])
        again = (
            r"engine 1 was started again 1 times within an hour \(RolloutConfig.max_restarts\), and is lost again: .*dead"
        )

        def sample() -> None:
            group.generate([[1]], SamplingConfig(max_new_tokens=1))

        with pytest.raises(EngineDeadError, match=again):
            until(lambda: sample() is not None, 30.0)
