"""What becomes of an engine whose vLLM fails in an update, and of those who wait for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.cluster.processes import Process
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.messages import AdapterVersion, Request
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RolloutError
from tests.support.answering import AnsweringStepper, Llm, serve

TURN = 5, Request([1, 2], SamplingConfig(), 10)


@pytest.fixture
def engine() -> Iterator[RolloutEngine]:
    made = RolloutEngine(RolloutConfig(model_path="x", max_adapters=2), 2, "cpu", False)
    made._vllm.llm = Llm()
    made._vllm.loop.start(made, AnsweringStepper)
    serve(made._vllm.serving, 3)
    yield made
    made._vllm.loop.stop()


STEPS: dict[str, tuple[str, Callable[[RolloutEngine], Any]]] = {
    "reset_prefix_cache": ("begin", lambda engine: engine.begin_update()),
    "start_weight_update": ("begin", lambda engine: engine.begin_update()),
    "update_weights": ("update", lambda engine: engine.update({})),
    "finish_weight_update": ("finish", lambda engine: engine.finish_update(4)),
}


@pytest.mark.parametrize("fails", STEPS)
def test_an_update_that_fails_once_it_has_begun_leaves_the_engine_dirty_for_good(engine: RolloutEngine, fails: str) -> None:
    engine._vllm.llm.errors = {fails: ValueError("of vLLM")}
    step, call = STEPS[fails]
    if step != "begin":
        engine.begin_update()
    waiting = 6, TURN[1]
    engine._vllm.loop.hold()
    engine.start_turns([waiting])
    with pytest.raises(
        EngineDirtyError,
        match=r"engine 2: a weight update failed after it had begun \(ValueError: of vLLM\); the engine refuses requests",
    ) as failed:
        call(engine)
    assert isinstance(failed.value.__cause__, ValueError) and failed.value.details == {"engine": "engine 2"}
    assert engine._vllm.serving.state == "dirty" and engine._vllm.serving.version == 3
    engine._vllm.llm.errors = {}
    engine.abandon_update("something later")
    engine.resume()
    told = len(engine._vllm.llm.told)
    for refused in (engine.begin_update, lambda: engine.update({}), lambda: engine.finish_update(4), engine.pause_turns):
        with pytest.raises(EngineDirtyError, match=r"dirty: a weight update failed .* \(ValueError: of vLLM\); restart it"):
            refused()
    assert len(engine._vllm.llm.told) == told, "vLLM is asked for nothing more"
    engine.start_turns([TURN])
    answers = engine.take_turns(5.0) + engine.take_turns(5.0)
    assert [key for key, _ in answers] == [6, 5]
    assert all(isinstance(answer, EngineDirtyError) and "of vLLM" in str(answer) for _, answer in answers)


def test_an_engine_that_serves_takes_no_weights_before_an_update_has_begun(engine: RolloutEngine) -> None:
    for call in (lambda: engine.update({}), lambda: engine.finish_update(4)):
        with pytest.raises(RolloutError, match="engine 2 cannot continue an update now: no weight update has begun"):
            call()
    assert not engine._vllm.llm.told and (engine._vllm.serving.state, engine._vllm.serving.version) == ("serving", 3)


def test_an_update_does_not_begin_while_vllm_has_requests_in_its_cache(engine: RolloutEngine) -> None:
    engine._vllm.llm.cache_is_emptied = False
    with pytest.raises(EngineDirtyError, match="engine 2: vLLM still has running requests, its prefix cache cannot be"):
        engine.begin_update()
    assert ("start_weight_update",) not in engine._vllm.llm.told


def test_a_vllm_process_that_ended_is_told_as_the_death_of_the_engine(engine: RolloutEngine) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

    ended = VllmEngineDeadError()
    engine._vllm.llm.errors = {"init_weight_transfer_engine": ended}
    engine._vllm.loop.hold()
    engine.start_turns([TURN])
    with pytest.raises(EngineDeadError, match=r"engine 2: a vLLM process ended \(.+\); restart it$") as dead:
        engine.init_transfer({})
    assert dead.value.__cause__ is ended and dead.value.details == {"engine": "engine 2"}
    ((key, answer),) = engine.take_turns(5.0)
    assert key == 5 and isinstance(answer, EngineDeadError), "and not that the engine is dirty"
    with pytest.raises(EngineDirtyError, match="a vLLM process ended: "):
        engine.pause_turns()


def test_any_error_of_vllm_is_the_death_of_the_engine_where_a_worker_has_ended(engine: RolloutEngine) -> None:
    with subprocess.Popen(["sleep", "60"]) as worker:
        engine._vllm.workers.watch([Process.of(worker.pid)])
        assert engine.pulse() is None
        worker.kill()
    engine._vllm.llm.errors = {"init_weight_transfer_engine": RuntimeError("Executor failed.")}
    engine._vllm.loop.hold()
    engine.start_turns([TURN])
    with pytest.raises(EngineDeadError, match=rf"engine 2 is dead: its worker process {worker.pid} ended"):
        engine.init_transfer({})
    assert f"engine 2 is dead: its worker process {worker.pid} ended" in str(engine.pulse())
    ((_, answer),) = engine.take_turns(5.0)
    assert isinstance(answer, EngineDeadError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_step_loop_itself_is_the_death_of_the_engine(engine: RolloutEngine) -> None:
    def slip() -> None:
        raise KeyError("key")

    engine._vllm.loop._commands.put(slip)
    assert engine._vllm.loop._thread is not None
    engine._vllm.loop._thread.join(10)
    with pytest.raises(EngineDeadError, match="its step loop has ended by KeyError: 'key'; restart it"):
        engine._vllm.loop.call(slip)
    assert "its step loop has ended by KeyError: 'key'; restart it" in str(engine.pulse())


def test_an_error_of_vllm_outside_an_update_is_itself_and_the_engine_serves_on(engine: RolloutEngine) -> None:
    error = KeyError("kind")
    engine._vllm.llm.errors = {"init_weight_transfer_engine": error}
    with pytest.raises(KeyError) as raised:
        engine.init_transfer({})
    assert raised.value is error and engine._vllm.serving.state == "serving"
    engine.start_turns([TURN])
    ((_, answer),) = engine.take_turns(5.0)
    assert not isinstance(answer, Exception) and answer.token_ids == [10, 11]


def test_turns_wait_from_the_hold_to_the_end_of_the_update(engine: RolloutEngine) -> None:
    engine.pause_turns()
    engine.start_turns([TURN])
    assert engine.take_turns(0.01) == []
    engine.begin_update()
    engine.resume_turns()
    assert engine._vllm.serving.state == "paused" and engine.take_turns(0.01) == [], "an update has begun since"
    engine.update({"part": 1})
    engine.finish_update(4)
    assert engine._vllm.serving.state == "paused" and engine.take_turns(0.01) == []
    engine.resume()
    ((_, answer),) = engine.take_turns(5.0)
    assert not isinstance(answer, Exception) and [span.version for span in answer.spans] == [4]
    update = [("start_weight_update",), ("update_weights", {"update_info": {"part": 1}}), ("finish_weight_update", "4")]
    assert engine._vllm.llm.told == ["reset_prefix_cache", *update]
    engine.pause_turns()
    engine.start_turns([TURN])
    engine.resume_turns()
    assert len(engine.take_turns(5.0)) == 1, "no update had begun"


def test_an_engine_that_waits_for_the_end_of_a_push_does_not_stand_still(engine: RolloutEngine) -> None:
    assert engine.seconds_without_progress() > 0
    engine.pause_turns()
    assert engine.seconds_without_progress() == 0
    engine.begin_update()
    engine.finish_update(4)
    assert engine.seconds_without_progress() == 0
    engine.resume()
    assert engine.seconds_without_progress() > 0


def test_adapters_that_were_loaded_are_loaded_again_after_an_update(
    engine: RolloutEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.rollout.engine.adapters.lora_request", lambda adapter: adapter.name)
    adapters = [AdapterVersion(name, 1, number, 8) for number, name in enumerate("abc", 1)]
    for adapter in adapters:
        engine._adapters.keep(adapter, {}, "")
    for adapter in adapters[:2]:
        engine._adapters.load(adapter)
    engine.begin_update()
    engine._vllm.llm.told.clear()
    engine.finish_update(4)
    loads = [("add_lora", "a@1#1"), ("adapter_problem", "memory://a@1#1", 1)]
    loads += [("add_lora", "b@1#2"), ("adapter_problem", "memory://b@1#2", 2)]
    assert engine._vllm.llm.told == [("finish_weight_update", "4"), *loads]
    engine.resume()
    engine.begin_update()
    engine._vllm.llm.answers["adapter_problem"] = ["it was damaged"]
    with pytest.raises(
        EngineDirtyError, match=r"failed after it had begun \(WeightCheckError: engine 2: a@1#1: it was damaged"
    ):
        engine.finish_update(5)


def test_an_update_that_is_interrupted_leaves_the_engine_dirty(engine: RolloutEngine) -> None:
    class Interrupt(BaseException):
        pass

    def interrupted() -> None:
        raise Interrupt

    engine.begin_update()
    with pytest.raises(EngineDirtyError, match=r"failed after it had begun \(Interrupt: \)"):
        engine._vllm.during_update(interrupted)
    assert engine._vllm.serving.state == "dirty"
