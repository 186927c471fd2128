"""Engines of a group from their start to their end, with actors of this process in place of Ray's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group import group as group_module
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import CLOSE_SECONDS, RolloutGroup
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter, Request
from actors.rollout.placement import NodePlace
from actors.wire.factors import PackedFactors
from rl_backend.contracts import (
    ConfigError,
    EngineDeadError,
    EngineDirtyError,
    RolloutError,
    WeightCheckError,
    WeightSyncError,
)
from tests.support.actors_in_process import Actor, RayInProcess, use

NODES = {0: "node a", 1: "node b", 2: "node a"}


def info(engine: int, pid: int) -> EngineInfo:
    facts: dict[str, Any] = {"node_ip": "", "host": "host", "cores": (), "device": "cpu", "dtype": "float32", "workers": 1}
    sizes: dict[str, Any] = {"device_ids": (), "vocab_size": 8, "max_model_len": 8, "version": 0, "state": "serving"}
    return EngineInfo(name=f"engine {engine}", pid=pid, node_id=NODES[engine], **facts, **sizes)


class Placement:
    """Gives each engine options of its own."""

    device = "cpu"

    def __init__(self, config: RolloutConfig, scheduling: Any) -> None:
        self.released = 0

    def options(self, engine: int) -> dict[str, Any]:
        return {"num_cpus": engine}

    def release(self) -> None:
        self.released += 1


class Cluster:
    """Engines that start as they are told to: every actor that a group made is in ``made``."""

    def __init__(self, ray: RayInProcess) -> None:
        self.ray = ray
        self.made: list[tuple[int, Actor]] = []
        self.answers: dict[int, dict[str, Any]] = {engine: {} for engine in NODES}
        self.asked: list[tuple[Any, ...]] = []
        ray.remote = self._remote  # type: ignore[attr-defined]

    def _remote(self, **options: Any) -> Any:
        def of_class(kind: type) -> Any:
            cluster = self

            class Handle:
                def __init__(self, own: dict[str, Any]) -> None:
                    self.own = own

                @staticmethod
                def options(**own: Any) -> Handle:
                    return Handle(own)

                def remote(self, config: RolloutConfig, engine: int, device: str, require_push: bool) -> Actor:
                    cluster.asked.append((kind, options, self.own, config, engine, device, require_push))
                    number = len(cluster.made)
                    answers = {
                        "locate": (NODES[engine], Process(1, "")),
                        "start": info(engine, number),
                        **cluster.answers[engine],
                    }
                    actor = Actor(f"actor {number} of engine {engine}", answers)
                    cluster.made.append((engine, actor))
                    return actor

            return Handle

        return of_class

    def of(self, engine: int) -> Actor:
        """The last actor of an engine."""
        return [actor for number, actor in self.made if number == engine][-1]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayInProcess:
    made = use(
        monkeypatch, *(f"actors.rollout.group.{name}" for name in ("group", "engines", "calls", "turns", "heartbeats"))
    )
    monkeypatch.setattr(group_module, "ray_is_usable", lambda: made.initialized)
    monkeypatch.setattr(group_module, "EnginePlacement", Placement)
    return made


@pytest.fixture
def cluster(ray: RayInProcess) -> Cluster:
    return Cluster(ray)


def living(engines: EngineSet | RolloutGroup) -> tuple[int, ...]:
    """Asked anew: mypy takes a property for what it was."""
    return engines.engines


def config(**settings: Any) -> RolloutConfig:
    return RolloutConfig(model_path="x", num_engines=3, **({"max_restarts": 0} | settings))


def test_every_engine_starts_at_its_place_among_those_of_its_node(cluster: Cluster) -> None:
    with RolloutGroup(config(require_push=True)) as group:
        assert [engine for engine, _ in cluster.made] == [0, 1, 2]
        places = {0: NodePlace(0, 2), 1: NodePlace(0, 1), 2: NodePlace(1, 2)}
        assert all(actor.asked == [("locate",), ("start", places[engine])] for engine, actor in cluster.made)
        assert group.infos == {engine: info(engine, engine) for engine in NODES} and living(group) == (0, 1, 2)
        for kind, options, own, given, engine, device, require_push in cluster.asked:
            assert kind is group.engine_class and options == {"concurrency_groups": {"turns": 1, "answers": 1, "pulse": 1}}
            assert own == {"num_cpus": engine} and given == group.config and (device, require_push) == ("cpu", True)
        placement: Any = group._placement
        assert not cluster.ray.killed and not placement.released
    assert sorted(cluster.ray.killed) == sorted(actor.name for _, actor in cluster.made) and placement.released == 1
    assert all(actor.asked[-1] == ("close",) for _, actor in cluster.made)


@pytest.mark.parametrize(("method", "engine"), [("locate", 2), ("start", 1), ("start", 2)])
def test_engines_that_started_are_ended_when_one_of_them_does_not(cluster: Cluster, method: str, engine: int) -> None:
    cluster.answers[engine][method] = WeightCheckError("this one cannot")
    with pytest.raises(WeightCheckError, match="this one cannot"):
        RolloutGroup(config())
    assert sorted(cluster.ray.killed) == sorted(actor.name for _, actor in cluster.made) and len(cluster.made) == 3


def test_engines_that_are_not_waited_for_start_meanwhile_and_what_kept_them_is_raised_where_they_are_joined(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    @contextmanager
    def held(_: Any) -> Iterator[None]:
        assert gate.wait(30)
        yield

    monkeypatch.setattr(group_module, "ending_stopped", held)
    with RolloutGroup(config(), wait=False) as group:
        assert living(group) == ()
        gate.set()
        group.join()
        assert living(group) == (0, 1, 2)
    cluster.answers[1]["start"] = WeightCheckError("this one cannot")
    with RolloutGroup(config(), wait=False) as group, pytest.raises(WeightCheckError, match="this one cannot"):
        group.join()
    assert set(cluster.ray.killed) == {actor.name for _, actor in cluster.made} and len(cluster.made) == 6


def test_engines_of_this_node_are_looked_at_until_they_have_joined(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []

    @contextmanager
    def looking(processes: Sequence[Process]) -> Iterator[None]:
        looked.append(list(processes))
        yield
        assert [len(actor.asked) for _, actor in cluster.made] == [2] * 3, "they have started"

    cluster.ray.node = "node a"
    monkeypatch.setattr(group_module, "ending_stopped", looking)
    with RolloutGroup(config()):
        assert looked == [[Process(1, "")] * 2]


def test_an_engine_may_take_so_long_to_start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "__init__", silent_at("start", Actor.__init__))
    with pytest.raises(EngineDeadError, match="engine 0 did not answer for 34 s; restart it"):
        RolloutGroup(config(start_timeout=34.0))
    assert cluster.ray.waited == [34.0] and len(cluster.ray.killed) == 3


def silent_at(method: str, init: Callable[..., None]) -> Callable[..., None]:
    def made(actor: Actor, name: str, answers: dict[str, Any], *, silent: Sequence[str] = ()) -> None:
        init(actor, name, answers, silent=[method, *silent])

    return made


def test_a_group_needs_a_strategy_for_each_engine(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="scheduling=2: expected one strategy for each of 3 engines"):
        RolloutGroup(config(), scheduling=["a", "b"])
    RolloutGroup(config(), scheduling=["a", "b", "c"]).close()


def test_a_restart_replaces_one_engine_and_gives_it_every_tenant(cluster: Cluster) -> None:
    group = RolloutGroup(config(max_adapters=2))
    pushed = [
        PushedAdapter(AdapterVersion(name, 3, number, 8), PackedFactors.of({}, "float32"), f"digest of {name}")
        for number, name in enumerate(("poet", "clerk"), 1)
    ]
    for each in pushed:
        group.lora.switch(each)
    group.engine_set.note(2, EngineDirtyError("engine 2 is dirty"))
    assert living(group) == (0, 1)
    group._require_push = True
    assert group.restart(2) == info(2, 3) == group.infos[2]
    assert living(group) == (0, 1, 2) and not group.lost_engines
    old, new = (actor for engine, actor in cluster.made if engine == 2)
    assert old.asked[-1] == ("close",) and cluster.ray.killed == [old.name] and cluster.asked[-1][-1] is True
    assert new.asked == [("locate",), ("start", NodePlace(1, 2)), *(("push_adapter", *each) for each in pushed)]
    assert not any(call[0] == "push_adapter" for engine, actor in cluster.made if engine != 2 for call in actor.asked)
    assert group.restart(0) == info(0, 4), "a healthy one, too"
    for engine in (3, -1):
        with pytest.raises(ConfigError, match=f"engine={engine}: the group has engines 0 to 2"):
            group.restart(engine)
    group.close()


def test_an_engine_that_joins_and_finds_no_weights_serves_after_the_next_push(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    given: list[tuple[int, ...]] = []
    publisher: Any = SimpleNamespace(give=lambda engines: given.append(living(engines)) or len(given) == 1)
    group.publisher = publisher
    group.restart(1)
    assert living(group) == (0, 1, 2) and given == [(1,)]
    group.restart(1)
    assert living(group) == (0, 2) and not group.lost_engines and given == [(1,), (1,)]
    fixed = group.engine_set.fixed()
    assert living(fixed) == (0, 1, 2), "a push goes there"
    fixed.have_weights([0, 1, 2])
    assert living(group) == (0, 1, 2)
    group.forget_weights()
    group.restart(1)
    assert len(given) == 2
    group.close()


@pytest.mark.parametrize("method", ["start", "push_adapter"])
def test_an_engine_that_does_not_restart_is_lost_with_the_reason_until_it_does(cluster: Cluster, method: str) -> None:
    group = RolloutGroup(config(max_adapters=1))
    group.lora.switch(PushedAdapter(AdapterVersion("poet", 3, 1, 8), PackedFactors.of({}, "float32"), ""))
    cluster.answers[1][method] = WeightSyncError("no memory")
    with pytest.raises(WeightSyncError, match="no memory"):
        group.restart(1)
    assert living(group) == (0, 2) and str(group.lost_engines[1]) == "no memory"
    assert cluster.ray.killed == ["actor 1 of engine 1", "actor 3 of engine 1"]
    assert group.infos[1] == info(1, 1), "as it was"
    cluster.answers[1].clear()
    group.restart(1)
    assert living(group) == (0, 1, 2) and not group.lost_engines
    group.close()


def test_an_interrupted_restart_is_said_of_the_engine(cluster: Cluster) -> None:
    group = RolloutGroup(config())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    cluster.answers[1]["start"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        group.restart(1)
    assert str(group.lost_engines[1]) == "engine 1 was ended by a restart that did not complete"
    assert isinstance(group.lost_engines[1], EngineDeadError) and living(group) == (0, 2)
    assert "actor 3 of engine 1" in cluster.ray.killed
    group.close()


def test_the_first_reason_of_a_death_is_kept_and_nothing_is_said_of_a_successor(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    actor = cluster.of(1)
    group.engine_set._lose(1, actor, EngineDirtyError("dirty"))
    group.engine_set._lose(1, actor, EngineDeadError("first"))
    group.engine_set._lose(1, actor, EngineDeadError("second"))
    assert str(group.lost_engines[1]) == "first"
    group.restart(1)
    group.engine_set._lose(1, actor, EngineDeadError("of the one before"))
    assert not group.lost_engines
    group.lost_engines[0] = EngineDeadError("a copy")
    group.infos.clear()
    assert not group.lost_engines and len(group.infos) == 3
    group.close()


def test_a_group_that_is_closed_ends_all_and_waits_for_no_engine_for_long(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    cluster.of(1).silent.add("close")
    cluster.of(0).silent.add("take_turns")
    ((turn,),) = group.turns.ask([[Request([1], SamplingConfig())]])
    cluster.ray.waited.clear()
    group.close()
    group.close()
    assert CLOSE_SECONDS in cluster.ray.waited and len(cluster.ray.killed) == 3
    with pytest.raises(RolloutError, match="the rollout group is closed"):
        turn.result(5)
    for use_it in (lambda: group.engine_set.call("describe"), lambda: group.restart(0)):
        with pytest.raises(RolloutError, match=r"the rollout group (is closed|was closed while engine 0 started)"):
            use_it()
    assert cluster.ray.killed[-1] == "actor 3 of engine 0" and not group.engine_set._actors
    with pytest.raises(WeightSyncError, match="the rollout group is closed"):
        group.lora.memory.take(64)


def test_a_group_is_closed_without_ray_too(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    cluster.ray.initialized = False
    segment = group.lora.memory.take(64)
    group.close()
    placement: Any = group._placement
    assert not cluster.ray.killed and not placement.released
    with pytest.raises(FileNotFoundError):
        open(segment.path).close()


def test_a_closing_group_lets_go_of_shared_memory_whatever_fails(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RolloutGroup(config())

    def fail() -> None:
        raise ValueError("Ray is gone")

    monkeypatch.setattr(group._placement, "release", fail)
    with pytest.raises(ValueError, match="Ray is gone"):
        group.close()
    with pytest.raises(WeightSyncError, match="the rollout group is closed"):
        group.lora.memory.take(64)


def test_calls_of_the_whole_group_raise_the_first_refusal(cluster: Cluster) -> None:
    group: RolloutGroup = RolloutGroup(config(sampling_timeout=55.0))
    for method, call in {
        "require_push": group.attach_weight_sync,
        "forget_weights": group.forget_weights,
        "sleep": lambda: group.sleep(2),
        "wake_up": group.wake_up,
        "describe": group.describe,
    }.items():
        group._require_push = False
        call()
        arguments = {"sleep": (2,), "wake_up": ("all",)}.get(method, ())
        assert all(actor.asked[-1] == (method, *arguments) for _, actor in cluster.made)
        assert group._require_push == (method in ("require_push", "forget_weights"))
        cluster.of(2).answers[method] = WeightCheckError(f"{method} fails")
        with pytest.raises(WeightCheckError, match=f"{method} fails"):
            call()
    for engine in NODES:
        cluster.of(engine).answers["describe"] = replace(info(engine, engine), version=9)
    assert {engine: each.version for engine, each in group.describe().items()} == {0: 9, 1: 9, 2: 9}
    cluster.of(0).silent.add("sleep")
    with pytest.raises(EngineDeadError, match="did not answer for 55 s"):
        group.sleep()
    group.close()


def test_engines_neither_sleep_nor_wake_while_weights_or_adapters_are_pushed(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    taken: list[bool] = []
    for _, actor in cluster.made:
        actor.answers |= {name: lambda *_: taken.append(group.engine_set.changing.locked()) for name in ("sleep", "wake_up")}
    group.sleep()
    group.wake_up()
    assert taken == [True] * 2 * len(cluster.made) and not group.engine_set.changing.locked()
    group.close()


def test_no_engine_is_started_again_while_the_others_have_given_their_memory_away(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    group.engine_set.note(1, EngineDeadError("engine 1 died"))
    group.sleep(2)
    group.sleep(2)
    with pytest.raises(RolloutError, match=r"engine 2 cannot start while engines sleep; call wake_up\(\) first"):
        group.restart(2)
    heal = threading.Thread(target=group._replace, args=(1,), kwargs={"lost_only": True}, daemon=True)
    heal.start()
    heal.join(0.05)
    assert heal.is_alive() and len(cluster.made) == 3
    group.wake_up("weights")
    heal.join(0.05)
    assert heal.is_alive() and len(cluster.made) == 3, "ranks have their weights there still"
    group.wake_up("kv_cache")
    heal.join(10)
    assert not heal.is_alive() and living(group) == (0, 1, 2)
    group.sleep()
    group.close()
    assert not any(lock.locked() for lock in group._restarting.values())
    assert group._replace(0, lost_only=True) is None and len(cluster.made) == 4, "a closed group starts none"  # type: ignore[func-returns-value]


def test_engines_that_are_lost_or_lack_weights_do_not_keep_the_others_awake(cluster: Cluster) -> None:
    group = RolloutGroup(config(max_restarts=1))
    group.healing.close()
    group.engine_set.heals = True
    publisher: Any = SimpleNamespace(give=lambda engines: False)
    group.publisher = publisher
    group.restart(1)
    assert living(group) == (0, 2)
    cluster.of(2).answers["sleep"] = EngineDeadError("engine 2 died")
    group.sleep(2)
    assert [cluster.of(engine).asked[-1] for engine in (0, 1)] == [("sleep", 2)] * 2 and living(group) == (0,)
    group.wake_up("weights")
    assert [cluster.of(engine).asked[-1] for engine in (0, 1)] == [("wake_up", "weights")] * 2
    cluster.of(0).answers["wake_up"] = WeightCheckError("another error")
    with pytest.raises(WeightCheckError, match="another error"):
        group.wake_up("kv_cache")
    for engine in (0, 1):
        group.engine_set._lose(engine, cluster.of(engine), EngineDeadError("dead"))
    group.wake_up("kv_cache")
    group.engine_set.heals = False
    with pytest.raises(EngineDeadError, match="no rollout engine is left"):
        group.wake_up("kv_cache")
    group.close()


def test_a_fixed_set_stays_with_the_processes_of_its_time(cluster: Cluster) -> None:
    group = RolloutGroup(config())
    group.engine_set.note(2, EngineDirtyError("dirty"))
    fixed = group.engine_set.fixed()
    before = cluster.of(0)
    group.restart(0)
    assert living(fixed) == (0, 1) and fixed.actors()[0] is before and list(fixed.lost_engines) == [2]
    assert isinstance(fixed.call("describe")[0], EngineDeadError)
    assert living(fixed) == (1,) and living(group) == (0, 1), "the successor lives"
    fixed.note(1, EngineDeadError("engine 1 died"))
    assert living(group) == (0,) and fixed.config == group.config
    with fixed.updating():
        assert group.engine_set.lock.locked() and group.engine_set.changing.locked()
    group.close()


def test_a_group_takes_no_strategy_beside_those_of_its_engines(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="scheduling=4: expected one strategy for each of 3 engines"):
        RolloutGroup(config(), scheduling=["a", "b", "c", "d"])
    assert not cluster.made


def test_a_group_that_is_closed_ends_engines_that_are_starting_and_starts_none_in_place_of_the_lost(
    cluster: Cluster,
) -> None:
    made, killed, known = list[RolloutGroup](), list[str](), threading.Event()

    def start(place: NodePlace) -> EngineInfo:
        assert known.wait(10)
        made[0]._end_all()
        killed.extend(cluster.ray.killed)
        return info(2, 2)

    cluster.answers[2]["start"] = start
    made.append(RolloutGroup(config(), wait=False))
    known.set()
    with pytest.raises(RolloutError, match="the rollout group was closed while engine 0, engine 1, engine 2 started"):
        made[0].join()
    assert sorted(killed) == sorted(actor.name for _, actor in cluster.made) and len(killed) == 3
    cluster.answers[2].clear()
    group = RolloutGroup(config())
    group.engine_set.note(2, EngineDeadError("killed"))
    group.close()
    group._replace(2, lost_only=True)
    assert len(cluster.made) == 6


def test_engines_are_started_for_a_push_where_all_that_slept_are_lost(cluster: Cluster) -> None:
    with RolloutGroup(config(sleep_mode=True)) as group:
        group.sleep(2)
        group.engine_set.heals = True
        for engine in (0, 1, 2):
            assert group._asleep is not None
            group.wake_up("weights")
            group.engine_set.note(engine, EngineDeadError("killed"))
        assert group._asleep is not None
        group.wake_up("weights")
        assert group._asleep is None and not group._restarting[1].locked()
