"""Engines that are lost and started again: backoff, limit, what waits meanwhile, and what is told."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig
from actors.rollout.group import healing as healing_module
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.healing import EngineEvent, Healing
from actors.watch.engine_events import EngineEvents
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RLBackendError, RolloutError, UnsupportedError
from tests.support.actors_in_process import until

DEAD = EngineDeadError("engine 1 is dead: killed; restart it")
HUNG = EngineDeadError("engine 1 is dead: stopped", hung=True)


class Group:
    """Engines 0 and 1; a replacement ends as ``outcomes`` say, one after the other."""

    def __init__(self, outcomes: list[RLBackendError | None], limit: int = 3) -> None:
        self.set = EngineSet(RolloutConfig(model_path="x", num_engines=2, max_restarts=limit))
        self.set.add({0: object(), 1: object()}, {})
        self.outcomes, self.replaced = outcomes, 0
        self.healing = Healing(self.set, self.replace)
        self.set.heals = limit > 0
        self.waited: list[float] = []
        closed: Any = SimpleNamespace(is_set=lambda: False, wait=self.waited.append)
        self.healing._closed = closed
        self.events: list[EngineEvent] = []
        self.healing.listeners.append(self.events.append)
        self.config = self.set.config

    def replace(self, engine: int) -> None:
        self.replaced += 1
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome
        self.set.add({engine: object()}, {})

    def lose(self, error: RLBackendError, engine: int = 1) -> None:
        self.set._lose(engine, self.set._actors[engine], error)
        self.healing.look()
        self.healing.look()

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.mark.parametrize(("error", "kind"), [(DEAD, "died"), (HUNG, "hung"), (EngineDirtyError("dirty"), "dirty")])
def test_a_lost_engine_is_replaced_at_once_and_told_of(error: RLBackendError, kind: str) -> None:
    group = Group([None, None])
    for _ in range(2):
        group.lose(error)
        until(lambda: not group.healing._busy)
        assert group.kinds() == [kind, "replaced"] and group.set.engines == (0, 1)
        assert group.events[1].seconds > 0 and group.events[1].reason == str(error).removesuffix("; restart it")
        group.events.clear()
    assert group.waited == [2.0], "the second time it waits"


def test_an_engine_that_fails_to_start_is_tried_later_and_later_up_to_the_limit() -> None:
    group = Group(
        [RolloutError("no memory"), UnsupportedError("no room"), UnsupportedError("no room"), *[DEAD] * 2], limit=3
    )
    group.lose(DEAD)
    until(lambda: group.set.given_up is not None)
    assert group.waited == [2.0, 60.0, 2.0, 60.0, 2.0, 4.0], "where there is no room, that counts for nothing"
    message = (
        r"engine 1 was started again 3 times within an hour \(RolloutConfig\.max_restarts\), and is lost again: .*killed$"
    )
    with pytest.raises(EngineDeadError, match=message):
        group.set.require_hope()
    assert group.kinds() == ["died"] and group.set.engines == (0,)


def test_restarts_of_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group([None] * 5, limit=1)
    now = [0.0]
    monkeypatch.setattr(healing_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(5):
        group.lose(DEAD)
        until(lambda: not group.healing._busy)
        now[0] += 3601
    assert group.replaced == 5 and not group.waited


def test_without_restarts_a_loss_is_told_once_and_nothing_is_started() -> None:
    group = Group([], limit=0)
    group.lose(DEAD)
    assert group.kinds() == ["died"] and not group.replaced
    group.set.remove(0, HUNG)
    with pytest.raises(EngineDeadError, match="killed"):
        group.set.wait_for_engine(DEAD)


def test_who_needs_an_engine_waits_for_one_but_not_for_a_push_that_waits_for_it() -> None:
    group = Group([None])
    for engine in (0, 1):
        group.set._lose(engine, group.set._actors[engine], DEAD)
    assert group.set.comes(time.monotonic())
    assert not group.set.comes(time.monotonic() - 2 * group.set.config.start_timeout)
    pusher = threading.Thread(target=group.set.wait_for_engine, args=(DEAD,))
    pusher.start()
    group.set.add({1: object()}, {}, lack_weights=True)
    pusher.join(10)
    assert not pusher.is_alive() and not group.set.comes(time.monotonic()) and group.set.engines == ()
    fixed = group.set.fixed()
    assert fixed.engines == (1,) and group.set.engines == ()
    with pytest.raises(EngineDeadError, match="no rollout engine is left"):
        group.set.call("describe")
    group.set.remove(0)
    group.set._lost.clear()
    with pytest.raises(RolloutError, match="engine 1 was restarted and has no weights of the trainer yet"):
        group.set.call("describe")
    fixed.have_weights([1])
    assert group.set.living().keys() == {1}
    group.set.add({1: object()}, {}, lack_weights=True)
    fixed.have_weights([1])
    assert not group.set.engines, "another process since"


def test_a_run_counts_its_engines_events_and_says_each_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    group: Any = Group([])
    with EngineEvents(group, "run 1: ") as events:
        assert events.take() == {}
        for event in (EngineEvent(1, "hung", "engine 1 is dead"), EngineEvent(1, "replaced", "engine 1 is dead", 2.5)):
            for listener in group.healing.listeners:
                listener(event)
        assert events.take() == {"engines/hung": 1, "engines/replaced": 1, "engines/seconds_lost": 2.5}
        assert events.take() == {}
    said = ["run 1: warning: engine 1 is dead; it is started again", "run 1: engine 1 was replaced after 2.5 s"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith(each) for line, each in zip(lines, said, strict=True))
    assert len(group.healing.listeners) == 1


def test_every_engine_has_restarts_of_its_own() -> None:
    group = Group([None] * 4, limit=2)
    for engine in (1, 0, 1, 0):
        group.lose(DEAD, engine)
        until(lambda: not group.healing._busy)
    assert group.set.given_up is None and group.set.engines == (0, 1)
    assert [event.engine for event in group.events] == [1, 1, 0, 0, 1, 1, 0, 0]
    assert group.waited == [2.0, 2.0]


def test_the_wait_before_a_restart_doubles_up_to_a_minute() -> None:
    group = Group([RolloutError("no memory")] * 8 + [None], limit=9)
    group.lose(DEAD)
    until(lambda: not group.healing._busy)
    assert group.waited == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert [(event.kind, event.reason) for event in group.events] == [
        ("died", "engine 1 is dead: killed"),
        ("replaced", "engine 1 is dead: killed"),
    ]


@pytest.mark.parametrize(("passed", "replaced"), [(3599, 1), (3601, 2)])
def test_restarts_of_the_last_hour_count(monkeypatch: pytest.MonkeyPatch, passed: int, replaced: int) -> None:
    group, now = Group([None] * 2, limit=1), [50.0]
    monkeypatch.setattr(healing_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    group.lose(DEAD)
    until(lambda: not group.healing._busy)
    now[0] += passed
    group.lose(HUNG)
    until(lambda: group.set.given_up is not None or not group.healing._busy)
    assert group.replaced == replaced and (group.set.given_up is None) == (replaced == 2)


def test_an_engine_that_is_given_up_is_so_for_its_last_error() -> None:
    group = Group([RolloutError("no memory"), RolloutError("no model; restart it")], limit=2)
    group.lose(DEAD)
    until(lambda: group.set.given_up is not None)
    assert str(group.set.given_up).endswith("and is lost again: no model")
    assert group.set.given_up is not None and group.set.given_up.details == {"engine": "engine 1", "max_restarts": 2}
    group.healing.look()
    assert group.kinds() == ["died"] and group.replaced == 2


def test_an_engine_that_answers_no_request_in_time_hangs() -> None:
    group = Group([], limit=0)
    group.lose(EngineDeadError("engine 1 has answered no request", sampling_timeout=60.0))
    group.lose(EngineDeadError("engine 0 is dead", hung=False), 0)
    assert group.kinds() == ["hung", "died"]


def test_events_of_one_kind_add_up_and_without_restarts_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    group: Any = Group([], limit=0)
    with EngineEvents(group) as events:
        heard = group.healing.listeners[-1]
        for engine, seconds in ((0, 2.5), (1, 1.25)):
            heard(EngineEvent(engine, "died", f"engine {engine} is dead"))
            heard(EngineEvent(engine, "replaced", "killed", seconds))
        assert events.take() == {"engines/died": 2, "engines/replaced": 2, "engines/seconds_lost": 3.75}
        heard(EngineEvent(1, "dirty", "engine 1 is dirty"))
        assert events.take() == {"engines/dirty": 1}
    assert "warning: engine 0 is dead; the others go on\n" in capsys.readouterr().out
