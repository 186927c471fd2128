"""What a push says of engines that are lost on its way, with stand-ins for ranks, engines and transport."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from actors.sync.gpu_transports import StreamingTransport
from actors.sync.push import WeightSync
from actors.sync.report import PushClock
from actors.sync.staged_transports import PushPlan, Staged, StagedTransport
from actors.train.group import PinnedRanks
from actors.wire.segment import Segment
from rl_backend.contracts import (
    EngineDeadError,
    EngineDirtyError,
    GroupFailedError,
    RanksReplacedError,
    RLBackendError,
    TensorInfo,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
)

PLAN = PushPlan("key", None, "float32", None, 4, (), "node", "host", kept=("kept",))


class Engines:
    """Two engines that answer each call as they are told to, and are asked no more once they are lost."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[int, Any]] = {}
        self.called: list[tuple[str, tuple[int, ...]]] = []
        self.verified: list[Any] = []
        self.lost: dict[int, Any] = {}
        self.serving: list[int] = []
        self.is_updating = False
        self.config = SimpleNamespace(sampling_timeout=5.0, tensor_parallel=1)

    @property
    def engines(self) -> tuple[int, ...]:
        return tuple(engine for engine in (0, 1) if engine not in self.lost)

    def call(self, method: str, *args: Any, each: Any = None, timeout: float = 600.0) -> dict[int, Any]:
        asked = self.engines
        self.called.append((method, asked))
        assert self.is_updating == (method != "verify" and method != "check_manifest")
        if method == "verify":
            self.verified += [(engine, *args, *(each(engine) if each else ())) for engine in asked]
        outcomes = {engine: self.answers.get(method, {}).get(engine) for engine in asked}
        for engine, outcome in outcomes.items():
            self.note(engine, outcome)
        return outcomes

    def note(self, engine: int, outcome: Any) -> None:
        if isinstance(outcome, EngineDeadError | EngineDirtyError):
            self.lost[engine] = outcome

    def have_weights(self, engines: Iterable[int]) -> None:
        self.serving = sorted(engines)

    @contextmanager
    def updating(self) -> Iterator[None]:
        self.is_updating = True
        yield
        self.is_updating = False


class InMemory(StagedTransport):
    name = "in memory"
    tensors: tuple[TensorInfo, ...] = ()

    def problem(self, plan: PushPlan, rollout: Any) -> str:
        return ""

    def stage(self, plan: PushPlan, train: Any, rollout: Any) -> Staged:
        segments = {engine: Segment(f"of {engine}", 64) for engine in (0, 1)}
        return Staged(WeightManifest(version=plan.version, tensors=self.tensors), segments, "checked already")


class Streaming(StreamingTransport):
    name = "streaming"

    def problem_of_gpus(self, plan: PushPlan, rollout: Any) -> str:
        return ""

    problem = problem_of_gpus

    def connect(self, plan: PushPlan, train: Any, rollout: Any) -> None: ...

    def reconnect(self) -> None: ...

    def send(self, plan: PushPlan, train: Any, rollout: Any) -> dict[str, Any]:
        return {}


class Pushed:
    """A push to two engines over one of the two kinds of transport."""

    def __init__(self, *, streams: bool) -> None:
        self.engines = Engines()
        self.changed: list[str] = []
        lora = SimpleNamespace(base_changed=self.changed.append)
        rollout: Any = SimpleNamespace(lora=lora, attach_weight_sync=lambda: None)
        train: Any = None
        self.sync = WeightSync(train, rollout, transport="gloo")
        self.streams = streams
        self.clock = PushClock()

    def push(self) -> tuple[int, ...]:
        engines: Any = self.engines
        if self.streams:
            return self.sync._push_streaming(Streaming(), PLAN, engines, self.clock)
        return self.sync._push_staged(InMemory(), PLAN, engines, self.clock)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.engines.called]


UPDATE = {False: ["load"], True: ["begin_update", "update", "finish_update"]}
BEFORE = {False: "verify", True: "check_manifest"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_push_updates_all_engines_and_waits_for_turns(streams: bool) -> None:
    pushed = Pushed(streams=streams)
    assert pushed.push() == (0, 1)
    assert pushed.methods == [BEFORE[streams], "pause_turns", *UPDATE[streams], "resume"]
    assert pushed.engines.serving == [0, 1] and pushed.sync._served == 4
    assert pushed.changed == [""] and "turns" in pushed.clock.seconds()
    if not streams:
        manifest = WeightManifest(version=4, tensors=(), kept=("kept",))
        assert pushed.engines.verified == [
            (engine, manifest, Segment(f"of {engine}", 64), "checked already") for engine in (0, 1)
        ]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("when", ["pause_turns", "update"])
@pytest.mark.parametrize("kind", [EngineDeadError, EngineDirtyError])
def test_an_engine_that_is_lost_on_the_way_is_told_and_the_others_serve_the_new_weights(
    streams: bool, when: str, kind: type[RLBackendError]
) -> None:
    pushed = Pushed(streams=streams)
    method = when if when == "pause_turns" else UPDATE[streams][-1]
    pushed.engines.answers[method] = {1: kind("engine 1 is lost")}
    with pytest.raises(kind, match="engine 1 is lost"):
        pushed.push()
    assert ("resume", (0,)) in pushed.engines.called and pushed.changed == [""]
    if when == "pause_turns":
        assert all(asked == (0,) for each, asked in pushed.engines.called if each in UPDATE[streams])


@pytest.mark.parametrize("streams", [False, True])
def test_all_engines_that_are_lost_are_told(streams: bool) -> None:
    pushed = Pushed(streams=streams)
    pushed.engines.answers["pause_turns"] = {0: EngineDeadError("engine 0 died")}
    pushed.engines.answers[UPDATE[streams][-1]] = {1: EngineDirtyError("engine 1 is dirty")}
    with pytest.raises(EngineDeadError, match="engine 0 died; engine 1 is dirty"):
        pushed.push()
    assert "resume" not in pushed.methods


@pytest.mark.parametrize("streams", [False, True])
def test_what_engines_refuse_before_anything_is_loaded_stops_the_push(streams: bool) -> None:
    pushed = Pushed(streams=streams)
    pushed.engines.answers[BEFORE[streams]] = {1: WeightCheckError("engine 1: weights are damaged")}
    with pytest.raises(WeightCheckError, match="weights are damaged"):
        pushed.push()
    assert pushed.methods == [BEFORE[streams]] and not pushed.changed


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("lost", [(), (0, 1)])
def test_turns_go_on_where_no_update_has_begun(
    monkeypatch: pytest.MonkeyPatch, streams: bool, lost: tuple[int, ...]
) -> None:
    pushed = Pushed(streams=streams)
    call, fails = pushed.engines.call, "begin_update" if streams else "load"

    def interrupted(method: str, *args: Any, **options: Any) -> dict[int, Any]:
        if method == fails:
            pushed.engines.lost |= dict.fromkeys(lost)
            raise KeyboardInterrupt
        return call(method, *args, **options)

    monkeypatch.setattr(pushed.engines, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pushed.push()
    released = [] if lost else ["resume_turns"]
    assert pushed.methods == [BEFORE[streams], "pause_turns", *released] and not pushed.changed


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_cannot_serve_again_is_told(streams: bool) -> None:
    pushed = Pushed(streams=streams)
    pushed.engines.answers["resume"] = {1: EngineDeadError("engine 1 died at the end")}
    with pytest.raises(EngineDeadError, match="engine 1 died at the end"):
        pushed.push()
    assert pushed.changed == [""] and pushed.engines.lost.keys() == {1}
    phases = ["turns", "stream", "resume"] if streams else ["stage", "verify", "turns", "load", "resume"]
    assert [name for name in pushed.clock.seconds() if name != "total"] == phases


class Kept(InMemory):
    """Keeps what is staged."""

    is_kept = True


def test_an_engine_that_joins_gets_what_is_staged_or_what_the_trainer_still_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(streams=False)
    sync, plans, staged = pushed.sync, [PLAN], []
    monkeypatch.setattr(InMemory, "stage", lambda *of, stage=InMemory.stage: staged.append(1) or stage(*of))
    monkeypatch.setattr(sync, "_plan", lambda: plans[0])
    sync._transport = Kept()
    of_push: Any = pushed.engines
    sync._push_staged(sync._transport, PLAN, of_push, pushed.clock)
    assert len(staged) == 1

    def give(**answers: dict[int, Any]) -> tuple[bool, list[str]]:
        engines: Any = Engines()
        engines.answers = answers
        return sync.give(engines), [method for method, _ in engines.called]

    assert give() == (True, ["verify", "pause_turns", "load", "resume"]) and len(staged) == 1
    kept = pushed.engines.verified[0][1]
    assert kept.kept == ("kept",) and sync._staged is not None and sync._staged.manifest == kept
    # The trainer goes on: what is staged is still what the others serve.
    plans[0] = replace(PLAN, version=5)
    assert give() == (True, ["verify", "pause_turns", "load", "resume"])
    for error in (EngineDeadError("died"), WeightCheckError("damaged")):
        if isinstance(error, EngineDeadError):
            with pytest.raises(EngineDeadError, match="died"):
                give(load={0: error})
        else:
            assert give(verify={1: error}) == (False, ["verify"])
    sync._transport, sync._staged = InMemory(), None
    assert give() == (False, []) and len(staged) == 1
    plans[0] = PLAN
    assert give() == (True, ["verify", "pause_turns", "load", "resume"]) and len(staged) == 2
    monkeypatch.setattr(sync, "_plan", lambda: (_ for _ in ()).throw(GroupFailedError("a rank died")))
    assert give() == (False, [])
    assert pushed.changed == [""], "nothing has changed for the others"


@pytest.mark.parametrize("heals", [True, False])
def test_a_push_that_loses_an_engine_that_is_replaced_goes_on(monkeypatch: pytest.MonkeyPatch, heals: bool) -> None:
    pushed = Pushed(streams=False)
    waited: list[str] = []
    engines: Any = SimpleNamespace(heals=heals, require_hope=lambda: None)
    engines.wait_for_engine = lambda error: waited.append(str(error))
    pushed.sync._rollout.engine_set = engines
    outcomes: list[Any] = [EngineDeadError("died"), EngineDirtyError("dirty"), WeightCheckError("damaged")]

    def push() -> Any:
        raise outcomes.pop(0)

    monkeypatch.setattr(pushed.sync, "_push", push)
    with pytest.raises(WeightCheckError if heals else EngineDeadError):
        pushed.sync.push()
    assert waited == (["died", "dirty"] if heals else [])


def test_a_push_begins_again_when_ranks_were_replaced_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed, tries = Pushed(streams=False), []
    pushed.sync._rollout.engine_set = SimpleNamespace(require_hope=lambda: None)  # type: ignore[assignment]
    report = SimpleNamespace(version=4, nbytes=8, transport="gloo", export=lambda: None)

    def push() -> Any:
        tries.append("push")
        if len(tries) < 3:
            raise RanksReplacedError("others have taken their place")
        return report

    monkeypatch.setattr(pushed.sync, "_push", push)
    pushed_report: Any = pushed.sync.push()
    assert pushed_report is report and len(tries) == 3


def test_an_engine_that_joins_while_ranks_are_replaced_gets_the_weights_of_the_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed, tries = Pushed(streams=False), []
    engines: Any = pushed.engines
    pushed.sync._served, pushed.sync._transport = PLAN.version, InMemory()

    def plan() -> PushPlan:
        tries.append("plan")
        if len(tries) == 1:
            raise RanksReplacedError("others have taken their place")
        return PLAN

    monkeypatch.setattr(pushed.sync, "_plan", plan)
    assert pushed.sync.give(engines) and len(tries) == 2
    assert pushed.methods == ["verify", "pause_turns", "load", "resume"]


def test_a_version_that_other_ranks_have_computed_again_has_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = Pushed(streams=False)
    one, other = (TensorInfo.of("weight", (2,), torch.float32).replace(digest=digest) for digest in ("1" * 16, "2" * 16))

    def push(ranks: Any, tensor: TensorInfo) -> None:
        pushed.sync._ranks = ranks
        monkeypatch.setattr(InMemory, "tensors", (tensor,))
        pushed.push()

    push("the first ranks", one)
    push("the first ranks", other)  # they may have loaded other weights
    push("the second ranks", other)
    loads = pushed.methods.count("load")
    with pytest.raises(WeightCheckError, match=r"^version 4 of the weights has other values on the ranks that replaced"):
        push("the third ranks", one)
    assert pushed.methods.count("load") == loads
    # In another layout the same weights may have other bits.
    push(PinnedRanks(None, 4, layout=1), other)  # type: ignore[arg-type]
    assert pushed.methods.count("load") > loads


@pytest.mark.parametrize("streams", [False, True])
def test_a_push_is_known_to_the_group_with_the_tenant_that_is_merged_into_it(streams: bool) -> None:
    pushed = Pushed(streams=streams)
    rollout: Any = pushed.sync._rollout
    pushed.sync._merged = "poet"
    pushed.engines.answers = {"resume": {1: WeightSyncError("engine 1 cannot serve")}}
    with pytest.raises(WeightSyncError, match="engine 1 cannot serve"):
        pushed.push()
    assert pushed.changed == ["poet"] and rollout.publisher is pushed.sync and pushed.sync._served == PLAN.version
    assert pushed.engines.serving == [0], "the other has the weights and does not sample"


def test_an_engine_that_joins_is_given_no_weights_that_others_do_not_serve_or_that_cannot_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed = Pushed(streams=False)
    sync, of_push = pushed.sync, cast(Any, pushed.engines)
    monkeypatch.setattr(sync, "_plan", lambda: PLAN)
    sync._transport = Kept()
    sync._push_staged(sync._transport, PLAN, of_push, pushed.clock)

    def give() -> tuple[bool, list[str]]:
        engines: Any = Engines()
        return sync.give(engines), [method for method, _ in engines.called]

    sync._served = PLAN.version - 1  # what is staged was not loaded
    assert give() == (False, [])
    sync._served, sync._staged = PLAN.version, None
    monkeypatch.setattr(Kept, "problem", lambda *_: "it is on another host")
    assert give() == (False, [])
    monkeypatch.setattr(Kept, "problem", lambda *_: "")
    assert give() == (True, ["verify", "pause_turns", "load", "resume"])
