"""Turns on the driver's side: asked, answered, given up, divided over engines, and asked again of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
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
from rl_backend.contracts import BatchError, EngineDeadError, EngineDirtyError, RLBackendError, RolloutError
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
        (future,) = self.turns.ask([replace(REQUEST, **options)])
        return future

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


def test_turns_and_answers_do_not_wait_behind_pushes(made: Made) -> None:
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
        with pytest.raises(EngineDeadError, match=r"engine 1 has answered no request for 0\.2 s .*sampling_timeout") as dead:
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
    with pytest.raises(EngineDeadError, match="has answered no request for 60 s"):
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


def test_turns_are_asked_together_and_those_of_a_call_are_not_given_up_with_episodes(made: Made) -> None:
    of_call = replace(REQUEST, waits=False)
    futures = made.turns.ask([of_call, REQUEST, of_call])
    assert made.of("start_turns") == [[(0, of_call), (1, REQUEST), (2, of_call)]]
    made.turns.give_up()
    assert made.of("give_up_turns") == [[1]] and made.turns.in_flight == 3
    made.answer((2, answer(12)), (0, EngineDirtyError("engine 1 is dirty")))
    assert futures[2].result(5) == answer(12) and isinstance(futures[0].exception(5), EngineDirtyError)
    assert [str(error) for error in made.lost] == ["engine 1 is dirty"]


class Engine(Actor):
    """Keeps what it is asked to answer; ``take_turns`` is answered by :meth:`answer`."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(name, {"start_turns": self._start}, silent=["take_turns"])
        self.number = number
        self.turns: dict[int, Request] = {}

    def _start(self, turns: list[tuple[int, Request]]) -> None:
        self.turns |= dict(turns)

    @property
    def prompts(self) -> list[int]:
        """The last tokens of what is not answered."""
        return [request.prompt_ids[-1] for request in self.turns.values()]

    def answer(self, count: int = 1, error: RLBackendError | None = None) -> None:
        """Answers the first requests with their seeds."""
        until(lambda: bool(self.open) and not self.open[-1].done and len(self.turns) >= count)
        answers: list[tuple[int, Response | RLBackendError]] = []
        for key in list(self.turns)[:count]:
            request = self.turns.pop(key)
            response = Response([request.seed or 0], [-0.5], "stop", (VersionSpan(3, 1),), engine=self.number)
            answers.append((key, error or response))
        self.open[-1].answer(answers)

    def die(self) -> None:
        until(lambda: bool(self.open) and not self.open[-1].done)
        self.open[-1].answer(ActorDiedError())


class Group:
    """Turns of engines 0, 1 and 4, each with room for two."""

    def __init__(self, *, heals: bool = False, room: int = 2) -> None:
        self.engines = EngineSet(RolloutConfig(model_path="x", sampling_timeout=77.0))
        self.engines.heals = heals
        self.turns = GroupTurns(self.engines)
        self.made: dict[int, Engine] = {}
        self.room = room
        for engine in (0, 1, 4):
            self.start(engine, f"actor {engine}")

    def start(self, engine: int, name: str) -> None:
        info: Any = SimpleNamespace(room=self.room)
        self.made[engine] = Engine(engine, name)
        self.engines.add({engine: self.made[engine]}, {engine: info})

    def ask(self, *prompts: int, n: int = 1, waits: bool = False) -> list[Future[Response]]:
        """Each prompt ``n`` times; the seeds are 10 times the prompt, and the number of the response."""
        groups = [
            [Request([prompt], REQUEST.sampling, 10 * prompt + index, waits=waits) for index in range(n)]
            for prompt in prompts
        ]
        return [each for answers in self.turns.ask(groups) for each in answers]

    def has(self, **prompts: list[int]) -> None:
        """Waits until engines have these, as ``e0=[1, 2]``, and no other."""
        wanted = {int(name[1:]): of_engine for name, of_engine in prompts.items()}
        until(lambda: {each: engine.prompts for each, engine in self.made.items() if engine.prompts} == wanted)


@pytest.fixture
def make(ray: RayInProcess) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def of(**options: Any) -> Group:
        groups.append(Group(**options))
        return groups[-1]

    yield of
    for group in groups:
        group.turns.end(RolloutError("the test is over"))


def test_prompts_go_to_engines_as_they_become_free_and_a_slow_one_gets_fewer(make: Callable[..., Group]) -> None:
    group = make()
    assert group.turns.in_flight == {0: 0, 1: 0, 4: 0}
    futures = group.ask(*range(1, 13))
    group.has(e0=[1, 4], e1=[2, 5], e4=[3, 6])
    messages = [len(args[0]) for engine in group.made.values() for name, *args in engine.asked if name == "start_turns"]
    assert messages == [2, 2, 2], "what is asked of an engine at one time is one message"
    for _ in range(3):
        for engine in (group.made[0], group.made[1]):
            engine.answer()
            until(lambda: len(engine.prompts) == 2)  # noqa: B023 called at once
    assert group.made[4].prompts == [3, 6], "it has answered nothing"
    while not all(future.done() for future in futures):
        for engine in group.made.values():
            if engine.prompts:
                engine.answer()
    assert [future.result(5).token_ids for future in futures] == [[10 * prompt] for prompt in range(1, 13)]
    engines = [future.result().engine for future in futures]
    assert engines.count(4) == 2 and engines.count(0) == engines.count(1) == 5


def test_responses_to_one_prompt_come_from_one_engine(make: Callable[..., Group]) -> None:
    group = make()
    futures = group.ask(1, 2, 3, 5, n=3)
    group.has(e0=[1] * 3, e1=[2] * 3, e4=[3] * 3)
    group.made[1].answer()
    group.has(e0=[1] * 3, e1=[2] * 2, e4=[3] * 3)
    group.made[1].answer()
    group.has(e0=[1] * 3, e1=[2, 5, 5, 5], e4=[3] * 3)
    assert [future.done() for future in futures[3:6]] == [True, True, False]


def test_a_turn_goes_to_the_engine_of_the_turns_before_whatever_it_has_to_do(make: Callable[..., Group]) -> None:
    group = make()
    (first,) = group.ask(7, waits=True)
    group.has(e0=[7])
    group.made[0].answer()
    assert first.result(5).token_ids == [70]
    group.ask(1, 2, 3, 4, 5, 6, 8)
    group.has(e0=[1, 4], e1=[2, 5], e4=[3, 6])
    later = Request([7, 70, 9], REQUEST.sampling, 1)
    ((turn,),) = group.turns.ask([[later]])
    group.has(e0=[1, 4, 9], e1=[2, 5], e4=[3, 6])
    group.turns.ask([[replace(later, prompt_ids=[7, 71, 10])], [replace(later, waits=False)]])
    group.made[4].answer()
    group.has(e0=[1, 4, 9], e1=[2, 5], e4=[6, 8])
    group.made[0].answer(3)
    assert turn.result(5).engine == 0
    group.has(e0=[10, 9], e1=[2, 5], e4=[6, 8])


def test_what_a_lost_engine_was_asked_is_asked_of_others_where_engines_are_replaced(
    make: Callable[..., Group], ray: RayInProcess
) -> None:
    for error in (ActorDiedError(), EngineDirtyError("engine 1 is dirty"), EngineDeadError("a vLLM process ended")):
        group = make(heals=True, room=4)
        futures = group.ask(1, 2, 3)
        group.has(e0=[1], e1=[2], e4=[3])
        old = group.made.pop(1)
        old.die() if isinstance(error, ActorDiedError) else old.answer(error=error)
        group.has(e0=[1, 2], e4=[3])
        assert 1 in group.engines.lost_engines and not futures[1].done()
        group.made[0].answer(2)
        group.made[4].answer()
        assert [each.result(5).token_ids for each in futures] == [[10], [20], [30]]


def test_what_is_asked_while_its_group_closes_is_refused(
    make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make()
    closed = RolloutError("the rollout group is closed")
    monkeypatch.setattr(group.turns, "_home", lambda request: group.turns.end(closed))
    with pytest.raises(RolloutError, match="is closed"):
        group.ask(1)
    assert not group.engines.asked and not group.turns._waiting


def test_without_replacement_a_call_has_the_error_of_its_engine_and_a_turn_another_engine(
    make: Callable[..., Group],
) -> None:
    group = make()
    call, turn = group.ask(1)[0], group.ask(2, waits=True)[0]
    group.has(e0=[1], e1=[2])
    for engine in (0, 1):
        group.made.pop(engine).die()
    with pytest.raises(EngineDeadError, match="engine 0 is dead: its process ended"):
        call.result(5)
    group.has(e4=[2])
    group.made.pop(4).die()
    with pytest.raises(EngineDeadError, match="engine 4 is dead"):
        turn.result(5)
    with pytest.raises(EngineDeadError, match=r"no rollout engine is left: .*engine 0 is dead"):
        group.ask(3)


def test_what_no_engine_can_answer_now_waits_for_one_that_is_replaced_and_not_for_a_push(
    make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make(heals=True)
    group.ask(1)
    group.has(e0=[1])
    dead = EngineDeadError("killed")
    until(lambda: bool(group.made[0].open))
    for engine in (0, 1, 4):
        group.engines.note(engine, dead, group.made[engine])
    group.made[0].die()
    until(lambda: bool(group.turns._waiting))
    futures = group.ask(2, 3)
    old = group.made[0]
    group.start(0, "new actor 0")
    assert group.made[0] is not old
    group.has(e0=[1, 2])
    until(lambda: bool(group.made[0].open))
    group.engines.note(0, dead, group.made[0])
    group.made.pop(0).die()
    group.engines.add({1: group.made[1]}, {1: SimpleNamespace(room=2)}, lack_weights=True)  # type: ignore[dict-item]
    with pytest.raises(EngineDeadError, match="engine 0 is dead: its process ended"):
        futures[0].result(5)
    with pytest.raises(EngineDeadError, match="no rollout engine is left"):
        futures[1].result(5)


def test_a_group_that_was_given_up_answers_nothing_more(make: Callable[..., Group]) -> None:
    group = make(heals=True)
    futures = group.ask(*range(8))
    group.has(e0=[0, 3], e1=[1, 4], e4=[2, 5])
    group.engines.give_up(EngineDeadError("too often"))
    with pytest.raises(EngineDeadError, match="too often"):
        futures[6].result(5)
    with pytest.raises(EngineDeadError, match="too often"):
        group.ask(9)
    assert not futures[0].done()


def test_turns_that_wait_are_cancelled_and_given_up_too(make: Callable[..., Group]) -> None:
    group = make()
    of_call = group.ask(*range(1, 8))
    group.has(e0=[1, 4], e1=[2, 5], e4=[3, 6])
    turn, cancelled = group.ask(8, 9, waits=True)
    assert cancelled.cancel() and of_call[3].cancel()
    until(lambda: any(name == "give_up_turns" for name, *_ in group.made[0].asked))
    group.turns.give_up()
    assert turn.result(5) == Response([], [], "abort") and not of_call[6].done()
    group.made[0].answer()
    group.has(e0=[4, 7], e1=[2, 5], e4=[3, 6])


def test_an_update_waits_for_calls_made_before_it_and_for_no_turn(make: Callable[..., Group]) -> None:
    group = make()
    (turn,), calls = group.ask(9, waits=True), group.ask(1, 2)
    group.has(e0=[9], e1=[1], e4=[2])
    updates = threading.Event()

    def update() -> None:
        with group.engines.fixed().updating():
            updates.set()

    thread = threading.Thread(target=update)
    thread.start()
    group.made[1].answer()
    assert calls[0].result(5) and not updates.wait(0.05)
    group.ask(3)
    group.made[4].answer()
    assert updates.wait(5) and not turn.done(), "the last was asked for later"
    thread.join()


def test_an_update_does_not_wait_where_no_engine_is_left_for_calls(make: Callable[..., Group]) -> None:
    group = make(heals=True)
    group.ask(1)
    group.has(e0=[1])
    for engine, actor in group.made.items():
        group.engines.note(engine, EngineDeadError("killed"), actor)
    group.engines.wait_for_calls()
    assert group.engines.asked


def test_a_group_has_turns_of_each_process_and_of_another_after_a_restart(
    make: Callable[..., Group], ray: RayInProcess
) -> None:
    group = make()
    first = group.ask(1, waits=True)[0]
    group.has(e0=[1])
    group.made[0].answer()
    first.result(5)
    old = group.made[0]
    ((turn,),) = group.turns.ask([[Request([1, 10, 2], REQUEST.sampling, 1)]])
    group.has(e0=[2])
    group.start(0, "new actor 0")
    ((later,),) = group.turns.ask([[Request([1, 10, 3], REQUEST.sampling, 1)]])
    group.has(e0=[3])
    old.die()
    until(lambda: ray.killed == ["actor 0"])
    assert group.engines.lost_engines == {}, "the new process lives"
    group.has(e0=[3, 2])
    group.made[0].answer(2)
    assert turn.result(5).engine == later.result(5).engine == 0
    group.turns.end(RolloutError("the rollout group is closed"))
    with pytest.raises(RolloutError, match="is closed"):
        group.ask(4)


def test_a_turn_may_take_as_long_as_the_group_says(make: Callable[..., Group]) -> None:
    group = make()
    group.ask(1)
    group.has(e0=[1])
    assert group.turns._turns[0]._limit == 77.0


def test_turns_of_every_engine_are_given_up_and_end_together(make: Callable[..., Group]) -> None:
    group = make()
    futures = group.ask(1, 2, 3, 5, waits=True)
    group.has(e0=[1, 5], e1=[2], e4=[3])
    group.turns.give_up()
    given_up = {
        number: [args for name, *args in engine.asked if name == "give_up_turns"] for number, engine in group.made.items()
    }
    assert given_up == {0: [[[0, 1]]], 1: [[[0]]], 4: [[[0]]]}
    closed = RolloutError("the rollout group is closed")
    group.turns.end(closed)
    assert [each.exception(5) for each in futures] == [closed] * 4


def test_how_much_an_engine_has_to_answer_is_exported(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr("actors.cluster.prometheus.set_gauge", lambda name, value, **tags: told.append((name, value, tags)))
    first, second = made.ask(), made.ask()
    made.answer((1, answer(1)))
    assert second.result(5)
    made.answer((0, answer(2)))
    assert first.result(5)
    until(lambda: len(told) == 4)
    assert told == [("rl_backend_rollout_queue", left, {"engine": "1"}) for left in (1, 2, 1, 0)]
