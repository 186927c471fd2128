"""Turns of one engine on the driver's side: asked, answered, given up, and failed with the engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.group import turns as turns_module
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.turns import ANSWER_SECONDS, EngineTurns, GroupTurns
from actors.rollout.messages import AdapterVersion, Request, Response, VersionSpan
from rl_backend.contracts import BatchError, EngineDeadError, RLBackendError, RolloutError
from tests.support.actors_in_process import Actor, RayInProcess, until, use

REQUEST = Request([1, 2], SamplingConfig(max_new_tokens=5), 7)
POET = AdapterVersion("poet", 5, 1, 8)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> RayInProcess:
    made = use(monkeypatch, "actors.rollout.group.turns", "actors.rollout.group.calls", "actors.rollout.group.engines")
    monkeypatch.setattr(turns_module, "ray_is_usable", lambda: made.initialized)
    return made


def answer(token: int) -> Response:
    return Response([token], [-0.5], "stop", (VersionSpan(3, 1),))


class Made:
    """The turns of an engine that answers when it is told to, and the errors by which it was lost."""

    def __init__(self, limit: float = 60.0) -> None:
        self.actor = Actor("actor 1", {"seconds_without_progress": 1e6}, silent=["take_turns"])
        self.lost: list[RLBackendError] = []
        self.turns = EngineTurns("engine 1", self.actor, limit, self.lost.append)

    def ask(self, **options: Any) -> Future[Response]:
        return self.turns.ask(replace(REQUEST, **options))

    def answer(self, *answers: tuple[int, Response | RLBackendError]) -> None:
        until(lambda: bool(self.actor.open) and not self.actor.open[-1].done)
        self.actor.open[-1].answer(list(answers))

    def of(self, method: str) -> list[Any]:
        return [args[0] for name, *args in self.actor.asked if name == method]


@pytest.fixture
def made(ray: RayInProcess) -> Iterator[Made]:
    turns = Made()
    yield turns
    turns.turns.end(RolloutError("the test is over"))


def test_each_turn_has_the_answer_of_its_own_key(made: Made) -> None:
    first, second = made.ask(), made.ask(adapter=POET, require_version=4)
    assert made.of("start_turns") == [
        [(0, REQUEST)],
        [(1, replace(REQUEST, adapter=POET, require_version=4))],
    ]
    assert made.turns.in_flight == 2
    made.answer((1, answer(11)), (99, answer(0)))
    assert second.result(5) == answer(11) and not first.done() and made.turns.in_flight == 1
    third = made.ask()
    made.answer()
    made.answer((2, BatchError("too long")), (0, answer(10)))
    assert first.result(5) == answer(10)
    with pytest.raises(BatchError, match="too long"):
        third.result(5)
    assert made.turns.in_flight == 0 and not made.lost
    assert set(made.of("take_turns")) == {ANSWER_SECONDS}


def test_turns_and_answers_do_not_wait_behind_calls_that_sample(made: Made) -> None:
    groups = {method: options["concurrency_group"] for method, options in made.actor.options.items()}
    assert groups == {
        "start_turns": "turns",
        "give_up_turns": "turns",
        "seconds_without_progress": "turns",
        "take_turns": "answers",
    }


def test_a_turn_that_is_cancelled_is_given_up_alone(made: Made) -> None:
    first, second = made.ask(), made.ask()
    assert second.cancel()
    assert made.of("give_up_turns") == [[1]]
    made.answer((1, answer(0)))
    made.answer((0, answer(10)))
    assert first.result(5) == answer(10) and second.cancelled()
    third = made.ask()
    made.turns.give_up()
    assert made.of("give_up_turns") == [[1], [2]] and not third.done()


def test_an_engine_that_ends_fails_all_its_turns_and_those_to_come(made: Made) -> None:
    first, second = made.ask(), made.ask()
    until(lambda: bool(made.actor.open))
    made.actor.open[-1].answer(ActorDiedError())
    for each in (first, second):
        with pytest.raises(EngineDeadError, match="engine 1 is dead: its process ended"):
            each.result(5)
    until(lambda: not made.turns._thread.is_alive())
    (error,) = made.lost
    late = made.ask()
    assert late.exception(5) is error and made.turns.in_flight == 0
    assert len(made.of("start_turns")) == 2
    second.cancel()
    assert not made.of("give_up_turns")


def test_an_error_of_ray_itself_ends_the_turns_and_loses_no_engine(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("Ray shuts down")

    monkeypatch.setattr(turns_module, "outcome_of", fail)
    turn = made.ask()
    made.answer()
    with pytest.raises(RolloutError, match="engine 1 cannot be asked any more: ValueError: Ray shuts down"):
        turn.result(5)
    assert not made.lost


def test_turns_end_when_ray_is_shut_down(made: Made, ray: RayInProcess) -> None:
    turn = made.ask()
    ray.initialized = False
    with pytest.raises(RolloutError, match="engine 1 cannot be asked any more: Ray has been shut down"):
        turn.result(5)


def test_an_engine_that_answers_no_turn_in_time_is_dead(ray: RayInProcess) -> None:
    made = Made(limit=0.2)
    started = time.monotonic()
    first = made.ask()
    time.sleep(0.1)
    second = made.ask()
    for each in (first, second):
        with pytest.raises(EngineDeadError, match=r"engine 1 has not answered a turn for 0\.2 s .*sampling_timeout") as dead:
            each.result(5)
        assert dead.value.details == {"engine": "engine 1", "sampling_timeout": 0.2}
    assert 0.2 <= time.monotonic() - started < 2 and len(made.lost) == 1


def test_a_process_that_does_not_answer_at_all_is_dead(ray: RayInProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "HANGING_SECONDS", 0.1)
    made = Made(limit=0.1)
    made.actor.silent.add("seconds_without_progress")
    with pytest.raises(EngineDeadError, match="its process hangs and is ended"):
        made.ask().result(5)
    assert ray.waited[-1] == 0.1 and len(made.lost) == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_an_engine_whose_turns_wait_for_a_push_or_its_waking_is_alive(ray: RayInProcess, clock: SimpleNamespace) -> None:
    made = Made(limit=60.0)
    made.actor.answers["seconds_without_progress"] = 0.0
    turn = made.ask()
    until(lambda: bool(made.actor.open))
    for waits in range(1, 4):
        clock.now += 61
        until(lambda: made.actor.asked.count(("seconds_without_progress",)) == waits)  # noqa: B023 called at once
    made.actor.answers["seconds_without_progress"] = 40.0
    clock.now += 61
    until(lambda: made.actor.asked.count(("seconds_without_progress",)) == 4)
    clock.now += 19
    assert not made.lost and made.turns._seconds_left() == 1
    made.actor.answers["seconds_without_progress"] = 60.0
    clock.now += 1
    with pytest.raises(EngineDeadError, match="has not answered a turn for 60 s"):
        turn.result(5)


def test_the_time_of_turns_begins_anew_with_every_answer(ray: RayInProcess, clock: SimpleNamespace) -> None:
    made = Made(limit=60.0)
    turns = [made.ask() for _ in range(4)]
    for key in range(3):
        until(lambda: bool(made.actor.open) and not made.actor.open[-1].done)
        clock.now += 59
        made.answer((key, answer(key)))
        assert turns[key].result(5) == answer(key)
        assert made.turns._seconds_left() == ANSWER_SECONDS
    clock.now += 60
    with pytest.raises(EngineDeadError):
        turns[3].result(5)


def test_an_engine_that_dies_before_it_says_how_long_it_stands_is_dead(ray: RayInProcess) -> None:
    made = Made(limit=0.1)
    made.actor.answers["seconds_without_progress"] = EngineDeadError("engine 1: a vLLM process ended")
    with pytest.raises(EngineDeadError, match="a vLLM process ended"):
        made.ask().result(5)
    assert len(made.lost) == 1


def test_the_wait_for_answers_is_as_long_as_a_turn_may_take(ray: RayInProcess) -> None:
    made = Made(limit=8.0)
    made.ask()
    until(lambda: bool(ray.waited))
    assert ray.waited[0] is not None and 7 < ray.waited[0] <= 8
    made.turns.end(RolloutError("over"))
    long = Made(limit=1000.0)
    long.ask()
    assert long.turns._seconds_left() == ANSWER_SECONDS
    long.turns.end(RolloutError("over"))


def test_what_has_ended_keeps_its_first_error(made: Made) -> None:
    turn = made.ask()
    first, second = RolloutError("first"), RolloutError("second")
    made.turns.end(first)
    made.turns.end(second)
    assert turn.exception(5) is first and made.ask().exception(5) is first
    until(lambda: not made.turns._thread.is_alive())
    assert not made.lost, "whoever ends the turns knows"


class Group:
    """Turns of engines 0, 1 and 4."""

    def __init__(self) -> None:
        self.engines = EngineSet(RolloutConfig(model_path="x", sampling_timeout=77.0))
        self.turns = GroupTurns(self.engines)
        self.made: dict[int, Actor] = {}
        for engine in (0, 1, 4):
            self.start(engine, f"actor {engine}")

    def start(self, engine: int, name: str) -> None:
        info: Any = None
        self.made[engine] = Actor(name, silent=["take_turns"])
        self.engines.add({engine: self.made[engine]}, {engine: info})


def test_a_group_has_turns_of_each_process_and_of_another_after_a_restart(ray: RayInProcess) -> None:
    group = Group()
    assert not group.turns.asked_for and group.turns.in_flight == {0: 0, 1: 0, 4: 0}
    turns = [group.turns.ask(engine, replace(REQUEST, adapter=POET)) for engine in (4, 4, 0)]
    assert group.turns.asked_for and group.turns.in_flight == {0: 1, 1: 0, 4: 2}
    assert group.made[4].asked[0] == ("start_turns", [(0, replace(REQUEST, adapter=POET))])
    group.turns.give_up()
    given_up = {
        engine: [each[1] for each in actor.asked if each[0] == "give_up_turns"] for engine, actor in group.made.items()
    }
    assert given_up == {0: [[0]], 1: [], 4: [[0, 1]]}
    old = group.made[4]
    group.start(4, "new actor 4")
    group.turns.ask(4, REQUEST)
    assert group.made[4].asked[0][0] == "start_turns" and group.turns.in_flight[4] == 1
    until(lambda: bool(old.open))
    old.open[-1].answer(ActorDiedError())
    with pytest.raises(EngineDeadError, match="engine 4 is dead"):
        turns[0].result(5)
    until(lambda: ray.killed == ["actor 4"])
    assert group.engines.lost_engines == {}, "the new process lives"
    until(lambda: bool(group.made[0].open))
    group.made[0].open[-1].answer(ActorDiedError())
    until(lambda: 0 in group.engines.lost_engines)
    with pytest.raises(EngineDeadError, match="engine 0 is lost: engine 0 is dead: its process ended"):
        group.turns.ask(0, REQUEST)
    assert group.turns.in_flight == {1: 0, 4: 1}
    group.turns.end(RolloutError("the rollout group is closed"))
    with pytest.raises(RolloutError, match="is closed"):
        group.turns.ask(4, REQUEST).result(5)


def test_a_turn_may_take_as_long_as_the_group_says(ray: RayInProcess) -> None:
    group = Group()
    group.turns.ask(1, REQUEST)
    assert group.turns._turns[1]._limit == 77.0
    group.turns.end(RolloutError("over"))
