"""Ranks and engines that have memory in turn: who moves when, alone and in a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import RLRun, Session
from actors.cluster.session import RunStopped
from actors.run import StopRequest
from actors.run.parts import Colocation
from actors.train.model import GroupModel
from rl_backend.contracts import ConfigError, RLBackendError
from tests.support import sampled_runs
from tests.support.sampled_runs import config_of, held_out_sets, inputs_of, without_ray

BATCH, HELD_OUT = "a batch", "the held-out set"


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


class Group:
    """Says what moves, of which model."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def to(self, handle: str, device: str, *, model: bool = True) -> None:
        self.events.append((handle, device if model else f"{device}, but not the model"))


class Engines:
    def __init__(self, events: list[Any], device_ids: tuple[str, ...] = ()) -> None:
        self.events = events
        self.infos = {0: SimpleNamespace(device_ids=device_ids)}

    def sleep(self, level: int) -> None:
        self.events.append(("sleep", level))

    def wake_up(self, part: str) -> None:
        self.events.append(("wake", part))


def test_nothing_but_pushed_weights_is_beside_engines_and_nothing_at_all_beside_keys_and_values() -> None:
    events: list[Any] = []
    group: Any = Group(events)
    policy, critic, reference = (GroupModel(group, name) for name in ("policy", "critic", "reference"))  # type: ignore[arg-type]
    turns = Colocation(Engines(events))  # type: ignore[arg-type]
    assert turns.to_ranks() and not turns.to_ranks() and events == [("sleep", 2)]
    for model in (policy, critic, reference):
        turns.add(model)
    events.clear()
    assert turns.to_engines(policy, lambda: events.append("push") or "report") == "report"  # type: ignore[arg-type, func-returns-value, comparison-overlap]
    assert events == [
        ("policy", "cpu, but not the model"),
        ("critic", "cpu"),
        ("reference", "cpu"),
        ("wake", "weights"),
        "push",
        *((name, "cpu") for name in ("policy", "critic", "reference")),
        ("wake", "kv_cache"),
    ]
    events.clear()
    assert turns.to_ranks()
    assert events == [("sleep", 2), *((name, "device") for name in ("policy", "critic", "reference"))]


def test_the_frozen_model_below_pushed_factors_stays_for_the_push() -> None:
    events: list[Any] = []
    group: Any = Group(events)
    actor, critic = (GroupModel(group, name, base="base") for name in ("actor", "critic"))  # type: ignore[arg-type]
    reference = GroupModel(group, "base")  # type: ignore[arg-type]
    turns = Colocation(Engines(events))  # type: ignore[arg-type]
    turns.to_ranks()
    for model in (actor, critic, reference):
        turns.add(model)
    events.clear()
    turns.to_engines(actor, lambda: events.append("push"))  # type: ignore[arg-type, return-value, func-returns-value]
    before = events[: events.index("push")]
    assert ("base", "cpu") not in before and ("base", "cpu, but not the model") in before
    assert events[-2:] == [("base", "cpu"), ("wake", "kv_cache")]
    assert {("actor", "cpu"), ("critic", "cpu")} <= set(events[events.index("push") + 1 :])
    events.clear()
    turns.to_ranks()
    assert {("actor", "device"), ("critic", "device"), ("base", "device")} <= set(events)


def test_on_cpus_a_run_says_what_is_not_freed() -> None:
    assert Colocation(Engines([], ("a GPU",))).describe() == "ranks and engines have memory in turn"  # type: ignore[arg-type]
    assert "; on CPUs sleeping engines free keys and values alone" in Colocation(Engines([])).describe()  # type: ignore[arg-type]


class Trainer(sampled_runs.Trainer):
    """Refuses what a model that is in host memory cannot do."""

    def __init__(self, config: Any, events: list[Any]) -> None:
        super().__init__(config)
        self.events, self.is_away, self.optimizer_is_away = events, False, False

    def to(self, handle: Any, device: str, *, model: bool = True) -> None:
        self.optimizer_is_away = device == "cpu"
        self.is_away = self.optimizer_is_away and (model or self.is_away)
        if model:
            self.events.append(device)

    def load_checkpoint(self, handle: Any, path: Path) -> None:
        self.events.append("load")
        assert not self.optimizer_is_away
        super().load_checkpoint(handle, path)

    def save_checkpoint(self, handle: Any, path: Path, *, asynchronous: bool = False, hf: bool = False) -> None:
        self.events.append(f"save {path.name}")
        assert not self.is_away and (hf or not self.optimizer_is_away)
        super().save_checkpoint(handle, path, asynchronous=asynchronous, hf=hf)


class SleepingEngines(sampled_runs.Engines):
    """Awake at first."""

    def __init__(self, config: Any, events: list[Any]) -> None:
        super().__init__(config)
        self.events, self.awake = events, {"weights", "kv_cache"}
        self.infos = {0: SimpleNamespace(device_ids=())}

    def sleep(self, level: int) -> None:
        assert self.awake == {"weights", "kv_cache"} and level == 2
        self.awake = set()
        self.events.append("sleep")

    def wake_up(self, part: str) -> None:
        self.awake.add(part)
        self.events.append(f"wake {part}")

    def submit(self, prompts: Any, sampling: Any, **options: Any) -> Any:
        assert self.awake == {"weights", "kv_cache"}
        self.events.append(HELD_OUT if sampling.log_probs is False else BATCH)
        return super().submit(prompts, sampling, **options)


class Sync(sampled_runs.Sync):
    def push(self) -> Any:
        engines: Any = self._rollout
        assert engines.awake == {"weights"}
        engines.events.append("push")
        return super().push()


def opened(monkeypatch: pytest.MonkeyPatch, config: Any, *names: str) -> list[Any]:
    """What ranks and engines do in a run that opens them itself."""
    events: list[Any] = []
    without_ray(monkeypatch, config, lambda: inputs_of(config, held_out_sets(*names)))
    trainer, engines = Trainer(config, events), SleepingEngines(config, events)
    monkeypatch.setattr("actors.run.parts.WeightSync", Sync)

    @contextmanager
    def open_session(config: Any, phases: Any) -> Iterator[Session]:
        yield Session([trainer], engines)  # type: ignore[list-item, arg-type]

    monkeypatch.setattr("actors.run.run.open_session", open_session)
    return events


@contextmanager
def begun(config: Any, stop: StopRequest | None = None) -> Iterator[tuple[RLRun, GroupModel]]:
    with RLRun(config, stop=stop) as run:
        policy = run.build_model("policy")
        run.begin("Mine", {"policy": policy})
        yield run, policy


def take_steps(config: Any, events: list[Any], stop_in: int = 0) -> None:
    stop = StopRequest()
    with begun(config, stop) as (run, policy):
        for step in run.steps():
            batch = run.collect()
            events.append(f"train {step}")
            if step == stop_in:
                stop.ask("SIGTERM")
            run.push()
            run.end_step(batch.metrics | {"log_prob_gap": 0.0, "step_ok": 1.0})
        run.save_model(policy)
        run.finish()


PUSH = ["wake weights", "push", "cpu", "wake kv_cache"]
"""What was trained moves away in two parts, of which the first is not said."""


def test_a_run_saves_before_ranks_move_away_and_takes_the_memory_back_to_save_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, colocate=True, save_every=2, steps=3, eval_dataset=f"{tmp_path}/train.jsonl")
    events = opened(monkeypatch, config, "x")
    take_steps(config, events)
    turn = [BATCH, "sleep", "device"]
    assert events == [
        *("sleep", *PUSH, HELD_OUT),
        *(*turn, "train 1", *PUSH),
        *(*turn, "train 2", "save policy", *PUSH),
        *(*turn, "train 3", "save policy", *PUSH, HELD_OUT),
        *("sleep", "device", "save model"),
    ]
    assert "ranks and engines have memory in turn; on CPUs" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_stopped_takes_the_memory_back_for_its_checkpoint_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, colocate=True, save_every=9, steps=3)
    events = opened(monkeypatch, config, "x")
    with pytest.raises(RunStopped):
        take_steps(config, events, stop_in=2)
    assert events[-5:] == ["cpu", "wake kv_cache", "sleep", "device", "save policy"]
    events = opened(monkeypatch, config, "x")
    take_steps(config, events)
    assert events[:3] == ["sleep", "load", "wake weights"] and "train 3" in events and "train 2" not in events


@pytest.mark.parametrize("when", ["before the next step", "before an evaluation"])
def test_engines_that_sleep_are_not_asked(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = {} if when == "before the next step" else {"eval_dataset": f"{tmp_path}/train.jsonl", "eval_every": 1}
    config = config_of(tmp_path, colocate=True, steps=3, **held_out)
    opened(monkeypatch, config, "x")
    with begun(config) as (run, policy):
        steps = run.steps()
        next(steps)
        metrics = run.collect().metrics | {"log_prob_gap": 0.0, "step_ok": 1.0}
        run.push()
        run.save_model(policy)
        if not held_out:
            run.end_step(metrics)
            next(steps)
        with pytest.raises(RLBackendError, match=r"^engines cannot sample now: with colocate .* call push before$"):
            run.end_step(metrics) if held_out else run.collect()
        run.push()
        run.collect()


@pytest.mark.parametrize("push", ["never", "after the end"])
def test_a_step_is_saved_once_also_without_a_push_or_with_one_after_its_end(
    push: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, colocate=True, save_every=1, keep_checkpoints=0, steps=1)
    events = opened(monkeypatch, config)
    with begun(config) as (run, _):
        for _ in run.steps():
            batch = run.collect()
            run.end_step(batch.metrics | {"log_prob_gap": 0.0, "step_ok": 1.0})
            if push == "after the end":
                run.push()
    assert events.count("save policy") == 1
    (committed,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert any("collector" in file.read_text() for file in committed.glob("*.json"))


def test_after_a_push_that_failed_ranks_have_their_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, colocate=True, save_every=1, steps=1)
    events = opened(monkeypatch, config)
    with begun(config) as (run, policy):
        for _ in run.steps():
            batch = run.collect()
            with monkeypatch.context() as fails:
                fails.setattr(sampled_runs.Sync, "push", lambda sync: refuse())
                with pytest.raises(RLBackendError, match="refused"):
                    run.push()
            run.save_model(policy)
            run.push()
            run.end_step(batch.metrics | {"log_prob_gap": 0.0, "step_ok": 1.0})
    last = events[events.index(BATCH) :]
    assert last == [BATCH, "sleep", "device", "save policy", "wake weights", "push", "device", "save model", *PUSH]


def refuse() -> None:
    raise RLBackendError("refused")


def test_a_session_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, colocate=True)
    session, _, _ = without_ray(monkeypatch, config, lambda: inputs_of(config))
    with pytest.raises(ConfigError, match=r"RLConfig\.colocate=True: .* give no session, or set colocate=False"):
        RLRun(config, session)
