"""The step loop of an engine, with a stand-in for vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig
from actors.rollout.engine import step_loop
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.engine.step_loop import Completion, StepLoop
from actors.rollout.messages import AdapterVersion
from rl_backend.contracts import RolloutError
from tests.support.answering import serve
from tests.support.stepping import BAD_SEED, FATAL_SEED, CountingStepper, ServedVersion, job

SOON = 10.0


@pytest.fixture
def stepper() -> CountingStepper:
    return CountingStepper(room=4)


@pytest.fixture
def host() -> ServedVersion:
    return ServedVersion()


@pytest.fixture
def loop(stepper: CountingStepper, host: ServedVersion) -> Iterator[StepLoop]:
    host.loop = made = StepLoop("engine 0")
    made.start(host, lambda: stepper)
    yield made
    stepper.allow(1000)
    made.stop()


def submit(loop: StepLoop, *jobs: Any) -> list[Future[Completion]]:
    return list(loop.submit(jobs).values())


def tokens(result: Future[Completion]) -> list[int]:
    return list(result.result(SOON).output.token_ids)


def versions(result: Future[Completion]) -> list[tuple[int, int]]:
    return [tuple(span) for span in result.result(SOON).spans]


def in_mid_step(
    loop: StepLoop,
    stepper: CountingStepper,
    steps: int,
    ask: Callable[[], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Asks the loop for something in the middle of a step, and allows so many steps, that one included."""
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask)
        wait_until(lambda: not loop._commands.empty())
        assert stepper.waits and not asked.done()
        meanwhile()
        stepper.allow(steps)
        asked.result(SOON)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.shows("turns: each is answered when it has ended, whatever still runs, and is what it is alone")
def test_a_request_is_answered_when_it_has_ended_whatever_else_runs(loop: StepLoop, stepper: CountingStepper) -> None:
    (long,) = submit(loop, job(100, 50))
    stepper.take(2)
    short, middle = submit(loop, job(200, 3), job(300, 5))
    stepper.allow(4)  # one of them waits already, without the new requests
    assert tokens(short) == [200, 201, 202]
    assert not middle.done() and not long.done()
    stepper.allow(60)
    assert tokens(middle) == list(range(300, 305))
    assert tokens(long) == list(range(100, 150))
    assert versions(long) == [(1, 50)]
    assert len(stepper.threads) == 1 and threading.get_ident() not in stepper.threads


def test_no_more_run_than_there_is_room_for(loop: StepLoop, stepper: CountingStepper) -> None:
    results = submit(loop, *(job(10 * number, 3) for number in range(11)))
    stepper.allow(20)
    assert [tokens(result)[0] for result in results] == [10 * number for number in range(11)]
    assert stepper.most_at_once == 4


def test_the_time_in_which_requests_run_is_told_once_they_have_ended_or_pause(
    loop: StepLoop, stepper: CountingStepper, host: ServedVersion
) -> None:
    results = submit(loop, job(100, 2), job(200, 3))
    stepper.allow(3)
    assert [len(tokens(result)) for result in results] == [2, 3]
    (paused,) = submit(loop, job(300, 4, pausable=True))
    stepper.take(2)
    in_mid_step(loop, stepper, 1, loop.hold)
    host.version = 2
    loop.release()
    stepper.allow(1)
    assert versions(paused) == [(1, 3), (2, 1)]
    loop.call(lambda: None)
    told = [(each.version, each.responses, each.prompt_tokens, each.response_tokens) for each in host.stretches]
    assert told == [(1, 2, 4, 5), (1, 0, 0, 0), (2, 1, 2, 4)]
    assert host.stretches[0].start < host.stretches[0].end <= host.stretches[1].start


@pytest.mark.shows("turns: a bad request fails alone")
def test_a_bad_request_fails_alone(loop: StepLoop, stepper: CountingStepper, host: ServedVersion) -> None:
    good, bad, other = submit(loop, job(1, 2), job(BAD_SEED, 2), job(5, 2))
    with pytest.raises(ValueError, match="a bad request"):
        bad.result(SOON)
    stepper.allow(3)
    assert (tokens(good), tokens(other)) == ([1, 2], [5, 6])
    assert len(host.left) == 3


def test_a_step_that_fails_fails_those_that_run_and_no_later_ones(loop: StepLoop, stepper: CountingStepper) -> None:
    fatal, neighbour = submit(loop, job(FATAL_SEED, 2), job(1, 2))
    stepper.allow(1)
    for result in (fatal, neighbour):
        with pytest.raises(RuntimeError, match="a step failed: the model fell over"):
            result.result(SOON)
    stepper.allow(2)
    assert tokens(submit(loop, job(7, 2))[0]) == [7, 8]
    assert not stepper.tokens


@pytest.mark.shows("turns: one that is given up is answered at once with what it had sampled; the others continue")
def test_requests_are_given_up_with_what_they_have(loop: StepLoop, stepper: CountingStepper) -> None:
    asked = loop.submit([job(100, 9), job(200, 3), *(job(300 + number, 3) for number in range(3))])
    stepper.take(1)
    first, *_, last = asked
    loop.give_up([first, last, 12345])
    stepper.allow(1)
    given_up, stays, *_, unbegun = asked.values()
    assert tokens(given_up) == [100, 101] and given_up.result().output.finish_reason == "abort"
    assert versions(given_up) == [(1, 2)]
    assert unbegun.result(SOON) == (None, 0, ())
    stepper.allow(5)
    assert tokens(stays) == [200, 201, 202]
    loop.give_up(asked)
    assert loop.call(lambda: not stepper.tokens)


@pytest.mark.shows(
    "turns: a push waits for those in flight, or pauses them and keeps their tokens; the version is each token's"
)
def test_a_hold_lets_requests_end_and_begins_no_other(loop: StepLoop, stepper: CountingStepper, host: ServedVersion) -> None:
    (running,) = submit(loop, job(100, 4))
    stepper.take(1)
    later: list[Future[Completion]] = []
    in_mid_step(loop, stepper, 3, loop.hold, meanwhile=lambda: later.extend(submit(loop, job(200, 6))))
    assert tokens(running) == [100, 101, 102, 103] and not stepper.forgotten
    later += submit(loop, job(300, 2))
    stepper.allow(9)
    loop.hold()
    assert loop.call(lambda: stepper.steps) == 4
    host.version = 2
    loop.release()
    assert [versions(each) for each in later] == [[(2, 6)], [(2, 2)]]


def test_a_hold_pauses_requests_between_two_tokens_and_each_token_has_its_version(
    loop: StepLoop, stepper: CountingStepper, host: ServedVersion
) -> None:
    adapter = AdapterVersion("tenant", 7, 1, 8)
    paused, whole = submit(loop, job(100, 7, pausable=True), job(200, 4, adapter=adapter))
    stepper.take(2)
    in_mid_step(loop, stepper, 2, loop.hold)
    assert stepper.forgotten == 1 and whole.done() and not paused.done()
    host.version = 2
    loop.release()
    stepper.take(1)
    in_mid_step(loop, stepper, 1, loop.hold)
    loop.release()
    wait_until(lambda: stepper.waits)
    host.version = 5
    in_mid_step(loop, stepper, 1, loop.hold)
    host.version = 3
    loop.release()
    assert tokens(paused) == list(range(100, 107))
    assert versions(paused) == [(1, 4), (2, 3)]
    assert versions(whole) == [(7, 4)]
    assert stepper.forgotten == 2


def test_a_pause_that_fails_fails_what_would_have_paused_and_holds_all_the_same(
    loop: StepLoop, stepper: CountingStepper, host: ServedVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ValueError("no keys to drop")

    monkeypatch.setattr(stepper, "forget", fail)
    running = submit(loop, job(100, 9, pausable=True), job(200, 9, pausable=True))
    stepper.take(1)
    waiting: list[Future[Completion]] = []
    in_mid_step(loop, stepper, 1, loop.hold, meanwhile=lambda: waiting.extend(submit(loop, job(300, 2))))
    for each in running:
        with pytest.raises(RuntimeError, match="a step failed: no keys to drop"):
            each.result(SOON)
    assert loop.call(lambda: not stepper.tokens) and len(host.left) == 2
    host.version = 2
    loop.release()
    stepper.allow(2)
    assert tokens(waiting[0]) == [300, 301] and versions(waiting[0]) == [(2, 2)]


def test_time_without_progress_runs_while_it_serves_and_begins_anew_with_every_end(
    loop: StepLoop, stepper: CountingStepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(step_loop, "time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: 0))

    def later() -> float:
        now[0] += 7
        return loop.seconds_without_progress

    assert later() >= 7
    result = submit(loop, job(100, 1), job(200, 9, pausable=True), job(300, 3))[0]
    stepper.take(1)
    assert tokens(result) == [100] and later() == 7
    seen: list[float] = []
    in_mid_step(loop, stepper, 2, loop.hold, meanwhile=lambda: seen.append(later()))
    assert seen == [14], "what must end before it holds still runs"
    assert later() == 0, "requests wait for the release"
    loop.release()
    assert later() == 7


def test_a_request_that_is_given_up_while_it_pauses_has_what_it_had(loop: StepLoop, stepper: CountingStepper) -> None:
    asked = loop.submit([job(100, 6, pausable=True)])
    stepper.take(2)
    in_mid_step(loop, stepper, 1, loop.hold)
    loop.give_up(asked)
    (result,) = asked.values()
    assert tokens(result) == [100, 101, 102] and versions(result) == [(1, 3)]


@pytest.mark.parametrize("level", [1, 2])
def test_turns_that_pause_are_lost_with_the_weights_alone(loop: StepLoop, stepper: CountingStepper, level: int) -> None:
    asleep: list[int] = []

    def sleep(level: int, mode: str) -> None:
        assert mode == "keep", "vLLM would abort requests that pause, without a word"
        asleep.append(level)

    llm = SimpleNamespace(sleep=sleep, wake_up=lambda: asleep.clear())
    engine = RolloutEngine(RolloutConfig(model_path="x", device="cuda", sleep_mode=True), 0, "cuda", False)
    engine._vllm.loop, engine._vllm.llm = loop, llm
    serve(engine._vllm.serving, 1)
    paused, waiting = submit(loop, job(100, 6, pausable=True)), []
    stepper.take(2)
    in_mid_step(loop, stepper, 1, lambda: engine.sleep(level))
    waiting = submit(loop, job(200, 1))
    assert asleep == [level] and [each.done() for each in (*paused, *waiting)] == [level == 2, False]
    engine.wake_up()
    if level == 2:
        assert not loop.call(waiting[0].done)
        loop.release()  # as `resume` does after the push
    stepper.allow(10)
    assert tokens(waiting[0]) == [200]
    if level == 1:
        assert tokens(paused[0]) == list(range(100, 106))
    else:
        with pytest.raises(RolloutError, match="engine 0 sleeps at level 2, which drops the weights of turns that pause"):
            paused[0].result(SOON)


def test_what_is_closed_answers_everything_with_the_error_until_it_is_released(
    loop: StepLoop, stepper: CountingStepper
) -> None:
    results = submit(loop, *(job(100, 6) for _ in range(6)))
    stepper.take(1)
    in_mid_step(loop, stepper, 1, lambda: loop.close(KeyError("dirty")))
    results += submit(loop, job(1, 1))
    for result in results:
        with pytest.raises(KeyError, match="dirty"):
            result.result(SOON)
    loop.hold()
    loop.release()
    stepper.allow(2)
    assert tokens(submit(loop, job(1, 1))[0]) == [1]


def test_adapters_beyond_the_slots_wait_in_order_and_others_pass_them(loop: StepLoop, stepper: CountingStepper) -> None:
    a, b, c = (AdapterVersion(name, 1, number, 8) for number, name in enumerate("abc", 1))
    stepper.room = 100
    first, second, third, again, plain = submit(
        loop, job(0, 5, adapter=a), job(10, 5, adapter=b), job(20, 2, adapter=c), job(30, 2, adapter=a), job(40, 2)
    )
    stepper.take(3)
    assert tokens(plain) == [40, 41]
    assert loop.adapters(running=True) == {a, b} and loop.adapters(running=False) == {a, b, c}
    assert not third.done() and not again.done()
    stepper.allow(20)
    assert [len(tokens(each)) for each in (first, second, third, again)] == [5, 5, 2, 2]


def test_the_stepper_is_made_on_the_thread_that_steps() -> None:
    made: list[str] = []

    def make() -> CountingStepper:
        made.append(threading.current_thread().name)
        return CountingStepper()

    loop = StepLoop("engine 0")
    loop.start(SimpleNamespace(), make)  # type: ignore[arg-type]
    loop.stop()
    assert made == ["engine 0 steps"]
