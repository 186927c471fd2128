"""The state machine of an engine: each step is allowed from the states that it names, and refused from all others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from actors.rollout.engine.in_process import ServingState
from actors.rollout.messages import AdapterVersion, EngineState
from rl_backend.contracts import UNVERSIONED, EngineDirtyError, RolloutError, WeightVersionError
from tests.support.answering import serve

STEPS: dict[str, tuple[Callable[[ServingState], object], dict[EngineState, EngineState]]] = {
    "pause": (ServingState.pause, {"serving": "paused", "paused": "paused"}),
    "finish": (lambda serving: serving.finish(8), {"paused": "paused"}),
    "sleep": (ServingState.sleep, {"serving": "asleep", "asleep": "asleep"}),
    "wake": (lambda serving: serving.wake("all"), {"serving": "serving", "asleep": "serving"}),
    "fail": (lambda serving: serving.fail("later"), dict.fromkeys(("serving", "paused", "asleep", "dirty"), "dirty")),
    "sample": (lambda serving: serving.check("sample"), {"serving": "serving"}),
}


def in_state(state: EngineState) -> ServingState:
    made = ServingState("engine 2")
    serve(made, 7)
    if state == "dirty":
        assert made.fail("the first") and not made.fail("the second")
    elif state != "serving":
        (made.pause if state == "paused" else made.sleep)()
    assert made.state == state and made.version == 7
    return made


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", ["serving", "paused", "asleep", "dirty"])
def test_each_step_is_allowed_from_some_states_alone(step: str, state: EngineState) -> None:
    call, allowed = STEPS[step]
    serving = in_state(state)
    if state in allowed:
        call(serving)
        assert serving.state == allowed[state]
        return
    kind = EngineDirtyError if state == "dirty" else RolloutError
    with pytest.raises(kind, match=r"dirty: .*\(the first\)" if state == "dirty" else "engine 2 cannot .* now: ") as refused:
        call(serving)
    assert refused.value.details["engine"] == "engine 2" and (serving.state, serving.version) == (state, 7)


def test_an_update_that_is_not_finished_is_not_resumed() -> None:
    serving = in_state("paused")
    with pytest.raises(RolloutError, match="engine 2 cannot sample now: a weight update is in progress"):
        serving.resume()
    assert serving.state == "paused"
    serving.finish(8)
    serving.resume()
    assert (serving.state, serving.version) == ("serving", 8)


@pytest.mark.parametrize("state", ["serving", "asleep", "dirty"])
def test_an_engine_that_had_no_part_in_an_update_stays_as_it_is_when_others_resume(state: EngineState) -> None:
    serving = in_state(state)
    serving.resume()
    assert serving.state == state


def test_an_engine_lacks_weights_until_the_push_that_it_requires() -> None:
    serving = ServingState("engine 2")
    assert not serving.lacks_weights
    serving.require_push()
    assert serving.lacks_weights and ServingState("engine 2", require_push=True).lacks_weights
    serve(serving, 0)
    assert not serving.lacks_weights
    serving.forget_version()
    assert serving.lacks_weights and serving.version == UNVERSIONED


def test_an_engine_whose_weights_alone_are_awake_takes_an_update_and_sleeps_on() -> None:
    serving = in_state("asleep")
    with pytest.raises(RolloutError, match="engine 2 is asleep: wake its weights before its keys and values"):
        serving.tags_to_wake("kv_cache")
    assert serving.tags_to_wake("all") is None and serving.tags_to_wake("weights") == ["weights"]
    serving.wake("weights")
    assert serving.state == "asleep"
    for action in ("sample", "continue an update"):
        with pytest.raises(RolloutError, match=f"engine 2 cannot {action} now: it is asleep"):
            serving.check(action)
    with pytest.raises(RolloutError, match="engine 2 cannot sleep now: its weights are awake"):
        serving.sleep()
    serving.pause()
    # Asked for once more, as by another driver.
    serving.pause()
    serving.finish(8)
    serving.resume()
    assert (serving.state, serving.version) == ("asleep", 8)
    # What is awake is not asked for again.
    assert serving.tags_to_wake("all") == serving.tags_to_wake("kv_cache") == ["kv_cache"]
    serving.wake("kv_cache")
    serving.check("sample")
    assert serving.tags_to_wake("all") is None
    serving.sleep()
    with pytest.raises(RolloutError, match="cannot take weights now: it is asleep"):
        serving.pause()


def test_every_update_must_be_finished_before_it_is_resumed() -> None:
    serving = in_state("serving")
    for version in (8, 9):
        serving.pause()
        with pytest.raises(RolloutError, match="a weight update is in progress"):
            serving.resume()
        serving.finish(version)
        serving.pause()  # by another driver
        with pytest.raises(RolloutError, match="a weight update is in progress"):
            serving.resume()
        serving.finish(version)
        serving.resume()
        assert (serving.state, serving.version) == ("serving", version)


def test_weights_that_were_never_pushed_are_older_than_the_first_version() -> None:
    serving, adapter = ServingState("engine 2"), AdapterVersion("poet", 0, 1, 8)
    serving.check_version(None, None)
    serving.check_version(adapter, 0)
    with pytest.raises(WeightVersionError, match="engine 2 serves weights of version -1, version 0 is required"):
        serving.check_version(None, 0)
    serve(serving, 0)
    serving.check_version(None, 0)
