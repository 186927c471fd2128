"""Calls of all living engines, and what is known of those that are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig
from actors.rollout.group.engines import EngineSet, are_on_node, engine_name, raise_failures
from rl_backend.contracts import (
    EngineDeadError,
    EngineDirtyError,
    RLBackendError,
    RolloutError,
    WeightCheckError,
)
from tests.support.actors_in_process import Actor, RayInProcess, use


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayInProcess:
    return use(monkeypatch, "actors.rollout.group.engines", "actors.rollout.group.calls")


class Set:
    """Engines 0, 2 and 5 without Ray, those in ``lost`` out of service, and the set that they are fixed from."""

    def __init__(self, lost: dict[int, RLBackendError] | None = None) -> None:
        self.actors = {engine: Actor(f"actor {engine}") for engine in (5, 0, 2)}
        infos: dict[int, Any] = {
            engine: SimpleNamespace(node_id=f"node {engine}", host="host", name=engine_name(engine))
            for engine in self.actors
        }
        self.origin = EngineSet(RolloutConfig(model_path="x", num_engines=6, sampling_timeout=60.0, call_timeout=77.5))
        self.origin.add(self.actors, infos)
        self.lost = dict(lost or {})
        self.origin._lost |= self.lost
        self.engines = self.origin.fixed()

    @property
    def told(self) -> list[tuple[int, str, str]]:
        """What the other set has been told."""
        lost = self.origin.lost_engines
        return [(engine, self.actors[engine].name, str(lost[engine])) for engine in lost if engine not in self.lost]


DEAD, DIRTY = EngineDeadError("it is dead"), EngineDirtyError("it is dirty")


@pytest.mark.usefixtures("ray")
def test_every_living_engine_is_called_with_its_own_arguments_behind_those_of_all() -> None:
    made = Set({2: DIRTY})
    for engine, actor in made.actors.items():
        actor.answers["load"] = lambda *args, engine=engine: (engine, args)
    assert made.engines.engines == (0, 5) and list(made.engines.infos) == [5, 0, 2]
    outcomes = made.engines.call("load", "of all", 7, each=lambda engine: (f"of {engine}", engine))
    assert outcomes == {0: (0, ("of all", 7, "of 0", 0)), 5: (5, ("of all", 7, "of 5", 5))}
    assert list(outcomes) == [0, 5] and not made.actors[2].asked
    assert made.engines.call("load") == {0: (0, ()), 5: (5, ())}
    assert made.engines.actors() == [made.actors[0], made.actors[5]]
    assert made.engines.trace_actors() == {"engine 0": made.actors[0], "engine 5": made.actors[5]}


@pytest.mark.parametrize(
    ("outcome", "lost", "killed"),
    [(DEAD, True, True), (DIRTY, True, False), (WeightCheckError("refused"), False, False), ("fine", False, False)],
)
def test_what_an_engine_answers_says_whether_it_is_lost(ray: RayInProcess, outcome: Any, lost: bool, killed: bool) -> None:
    for by_call in (True, False):
        made = Set()
        if by_call:
            made.actors[2].answers["load"] = outcome
            assert made.engines.call("load") == {0: None, 2: outcome, 5: None}
        else:
            made.engines.note(2, outcome)
            made.engines.note(3, outcome)  # no such engine
        assert made.engines.engines == ((0, 5) if lost else (0, 2, 5))
        assert made.engines.lost_engines == ({2: outcome} if lost else {})
        assert made.told == ([(2, "actor 2", str(outcome))] if lost else [])
    assert ray.killed == (["actor 2"] * 2 if killed else [])


def test_an_engine_that_does_not_answer_in_time_is_dead_and_ended(ray: RayInProcess) -> None:
    made = Set()
    made.actors[0].silent = {"describe"}
    outcomes = made.engines.call("describe", timeout=7.0)
    assert isinstance(outcomes[0], EngineDeadError) and "engine 0 did not answer for 7 s" in str(outcomes[0])
    assert outcomes[2] is None and ray.waited == [7.0] and ray.killed == ["actor 0"]
    made.actors[2].silent = {"describe"}
    assert "did not answer for 77.5 s" in str(made.engines.call("describe")[2])


@pytest.mark.parametrize("kill", [True, False])
def test_updates_that_are_abandoned_take_their_engines_out_of_service(ray: RayInProcess, kill: bool) -> None:
    made = Set()
    errors = made.engines.abandon([5, 0, 3], "the trainer failed", kill=kill)
    assert list(errors) == [5, 0, 3]
    for engine, error in errors.items():
        assert str(error) == (
            f"engine {engine}: a weight update had begun and was abandoned (the trainer failed); restart it"
        )
        assert type(error) is EngineDirtyError and error.details == {"engine": f"engine {engine}"}
    assert made.engines.engines == (2,) and [engine for engine, *_ in made.told] == [5, 0]
    asked = [] if kill else [("abandon_update", "the trainer failed")]
    assert [made.actors[engine].asked for engine in (0, 2, 5)] == [asked, [], asked]
    assert ray.killed == (["actor 5", "actor 0"] if kill else [])


@pytest.mark.usefixtures("ray")
def test_a_call_of_engines_that_are_all_lost_raises_the_first_kind_with_all_reasons() -> None:
    made = Set({2: DIRTY, 0: DEAD, 5: DEAD})
    with pytest.raises(EngineDirtyError, match="no rollout engine is left: it is dirty; it is dead; it is dead") as refused:
        made.engines.call("resume")
    assert refused.value.details == {"engines": [0, 2, 5]}
    empty = Set()
    empty.engines.remove_all()
    with pytest.raises(RolloutError, match="the rollout group is closed"):
        empty.engines.call("resume")


def test_nothing_else_changes_engines_in_an_update() -> None:
    engines = Set().engines
    with engines.updating():
        assert engines.lock.locked() and engines.changing.locked()
    assert not engines.lock.locked() and not engines.changing.locked()


def test_a_fixed_set_knows_its_losses_alone() -> None:
    lost: dict[int, RLBackendError] = {2: DIRTY}
    made = Set(lost)
    made.engines.lost_engines.clear()
    made.engines._lose(0, made.actors[0], DEAD)
    assert made.engines.lost_engines == {2: DIRTY, 0: DEAD} and lost == {2: DIRTY}
    assert made.told == [(0, "actor 0", "it is dead")]


def test_engines_are_on_a_node_where_all_that_live_are() -> None:
    made = Set({2: DEAD})
    infos: dict[int, Any] = made.engines.infos
    infos[0].node_id = infos[5].node_id = "here"
    assert are_on_node(made.engines, "here", "host")
    assert not are_on_node(made.engines, "there", "host") and not are_on_node(made.engines, "here", "another host")
    infos[5].host = "another host"
    assert not are_on_node(made.engines, "here", "host")


def test_errors_of_several_engines_are_one_of_the_first_ones_type_with_the_text_of_all() -> None:
    raise_failures({})
    raise_failures({0: None, 1: "fine"})
    only = EngineDeadError("engine 1 died", engine="engine 1")
    with pytest.raises(EngineDeadError) as raised:
        raise_failures({0: None, 1: only})
    assert raised.value is only
    with pytest.raises(WeightCheckError, match="damaged; engine 1 died") as both:
        raise_failures({0: WeightCheckError("damaged", names=["a"]), 2: None, 1: only})
    assert both.value.details == {"names": ["a"]}


def test_the_first_death_of_an_engine_is_kept_and_takes_the_place_of_dirt() -> None:
    made, later = Set(), EngineDeadError("it died again")
    for error, kept in ((DIRTY, DIRTY), (EngineDirtyError("dirtier"), None), (DEAD, DEAD), (later, DEAD), (DIRTY, DEAD)):
        made.engines._lose(2, made.actors[2], error)
        expected = error if kept is None else kept
        assert made.engines.lost_engines == made.origin.lost_engines == {2: expected}


def test_what_a_process_says_that_was_replaced_is_of_no_concern_to_the_engine(ray: RayInProcess) -> None:
    made, new = Set(), Actor("new")
    made.origin.add({2: new}, {})
    made.origin.note(2, DEAD, made.actors[2])
    assert not made.origin.lost_engines and ray.killed == ["actor 2"], "the process that said it is ended"
    made.engines.note(2, DIRTY)
    assert made.engines.engines == (0, 5) and made.origin.engines == (0, 2, 5) and not made.told
    made.origin.note(2, DIRTY)
    assert made.origin.lost_engines == {2: DIRTY}
    assert made.origin.remove(2, DEAD) is new and made.origin.lost_engines == {2: DEAD} and made.origin.remove(2) is None
    made.origin.add({2: new}, {}, lack_weights=True)
    assert not made.origin.lost_engines and made.origin.engines == (0, 5)
    assert list(made.origin.living(pushable=True)) == [0, 2, 5]
    made.origin.add({2: new}, {})
    assert made.origin.engines == (0, 2, 5)


def test_a_push_waits_for_an_engine_as_long_as_one_comes() -> None:
    made = Set({2: DIRTY, 0: DEAD, 5: DEAD}).origin
    mine = EngineDeadError("mine")
    with pytest.raises(EngineDeadError, match="mine"):
        made.wait_for_engine(mine)
    made.heals = True
    made.give_up(RolloutError("too often"))
    with pytest.raises(RolloutError, match="too often"):
        made.wait_for_engine(mine)
    assert Set().origin.comes(0.0) is False, "one is here"
