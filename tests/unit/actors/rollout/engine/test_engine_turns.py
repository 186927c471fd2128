"""Turns in an engine: each is answered with its own tokens, versions and routes, or its own error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine import engine as engine_module
from actors.rollout.engine.engine import RolloutEngine, TurnQueue
from actors.rollout.engine.step_loop import Completion
from actors.rollout.messages import AdapterVersion, Request, Response, VersionSpan
from rl_backend.contracts import BatchError, RLBackendError, RolloutError, WeightVersionError
from tests.support.answering import AnsweringStepper, Llm, serve
from tests.support.stepping import CountingStepper

POET = AdapterVersion("poet", 5, 1, 8)


class Answered(dict[int, int]):
    """Each key is gone as soon as it has been looked for: its turn is answered at that moment, by another thread."""

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        return self.pop(key, default)


def test_a_turn_that_is_answered_while_it_is_given_up_holds_up_no_other() -> None:
    given_up: list[Sequence[int]] = []
    vllm: Any = SimpleNamespace(loop=SimpleNamespace(give_up=given_up.append))
    queue = TurnQueue(vllm)
    queue._keys = Answered({7: 0, 8: 1})
    queue.give_up([7, 9, 8])
    assert given_up == [[0, 1]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutEngine]]:
    made: list[RolloutEngine] = []
    monkeypatch.setattr("actors.rollout.engine.adapters.lora_request", lambda adapter: adapter.name)

    def of(stepper: Any = None, **settings: Any) -> RolloutEngine:
        server = RolloutEngine(RolloutConfig(model_path="x", max_adapters=2, **settings), 4, "cpu", False)
        server._vllm.llm = Llm()
        serve(server._vllm.serving, 3)
        server._adapters._kept[POET.number] = POET
        used = stepper or AnsweringStepper()
        server._vllm.loop.start(server, lambda: used)
        made.append(server)
        return server

    yield of
    for each in made:
        each._vllm.loop.stop()


def turn(key: int, prompt: Sequence[int], seed: int = 10, **options: Any) -> tuple[int, Request]:
    return key, Request(prompt, SamplingConfig(), seed, **options)


def answers(server: RolloutEngine, count: int) -> dict[int, Response | RLBackendError]:
    found: dict[int, Response | RLBackendError] = {}
    while len(found) < count:
        taken = server.take_turns(5.0)
        assert taken
        found |= dict(taken)
    return found


@pytest.mark.parametrize(("routed", "masked"), [(False, False), (True, False), (True, True), (False, True)])
def test_each_turn_is_answered_under_its_own_key(
    make: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch, routed: bool, masked: bool
) -> None:
    counted: list[tuple[str, float, dict[str, str]]] = []
    monkeypatch.setattr("actors.cluster.prometheus.count", lambda name, amount, **tags: counted.append((name, amount, tags)))
    server = make(return_routed_experts=routed, engine_args={"return_sampling_mask": masked})
    server._vllm.moe_layers = (2, 0)
    server.start_turns([turn(70, [1, 2, 3]), turn(50, [4], 21, adapter=POET)])
    found = answers(server, 2)
    long, short = found[70], found[50]
    assert isinstance(long, Response) and isinstance(short, Response)
    assert (long.token_ids, long.log_probs) == ([10, 11, 12], [-10 / 8, -11 / 8, -12 / 8])
    assert (long.finish_reason, long.spans, long.cached_tokens) == ("length", (VersionSpan(3, 3),), 2)
    assert long.engine == short.engine == 4
    assert (short.token_ids, short.finish_reason, short.spans, short.cached_tokens) == (
        [21],
        "stop",
        (VersionSpan(5, 1),),
        0,
    )
    for answer, rows in ((long, 5), (short, 1)):
        if routed:
            assert answer.routes is not None
            assert answer.routes[:, :, 0].tolist() == [[10 * row + 2, 10 * row] for row in range(rows)]
        else:
            assert answer.routes is None
        masks = None if answer.sampling_mask is None else answer.sampling_mask.tolist()
        assert masks == ([[0, token] for token in answer.token_ids] if masked else None)
    of_long = [(name.removeprefix("rl_backend_"), amount) for name, amount, _ in counted if amount > 1]
    assert of_long == [("rollout_tokens_total", 3), ("turn_prompt_tokens_total", 3), ("turn_cached_tokens_total", 2)]
    assert [name for name, _, _ in counted].count("rl_backend_rollout_responses_total") == 2
    assert all(tags == {"engine": "4"} for *_, tags in counted) and not server._turns._keys


def test_whatever_is_wrong_with_a_turn_is_its_own_answer(make: Callable[..., RolloutEngine]) -> None:
    server = make()
    wrong: dict[int, tuple[tuple[int, Request], type[Exception], str]] = {
        1: (turn(1, [1] * 16), BatchError, r"the prompt has 16 tokens; expected 1 to 15"),
        2: (turn(2, [50]), BatchError, "the prompt has token ids from 50 to 50; expected 0 to 49"),
        3: (turn(3, [1], require_version=4), WeightVersionError, "engine 4 serves weights of version 3, version 4"),
        4: (turn(4, [1], adapter=POET, require_version=6), WeightVersionError, "serves 'poet' at version 5, version 6"),
        5: (turn(5, [1], adapter=AdapterVersion("clerk", 9, 7, 8)), RolloutError, "does not have clerk@9#7: push it"),
    }
    fine = [turn(8, [1], require_version=3), turn(9, [1], adapter=POET, require_version=5)]
    server.start_turns([*(each for each, *_ in wrong.values()), *fine])
    found = answers(server, 7)
    for key, (_, kind, message) in wrong.items():
        error = found[key]
        assert type(error) is kind and message in str(error), key
    assert isinstance(found[8], Response) and isinstance(found[9], Response)


def test_errors_of_any_type_become_answers_with_the_engines_name(make: Callable[..., RolloutEngine]) -> None:
    class Refusing(AnsweringStepper):
        def add(self, key: int, job: Any) -> None:
            raise ValueError("vLLM has no room")

    server = make(Refusing())
    server.start_turns([turn(1, [1])])
    error = answers(server, 1)[1]
    assert type(error) is RolloutError and str(error) == "engine 4 failed with ValueError: vLLM has no room"
    assert error.details == {"engine": "engine 4"}


def test_a_turn_before_the_first_push_is_refused_where_weights_must_be_pushed(make: Callable[..., RolloutEngine]) -> None:
    server = make()
    server.forget_weights()
    server.start_turns([turn(1, [1])])
    error = answers(server, 1)[1]
    assert isinstance(error, RolloutError) and "engine 4 has no weights of the trainer yet" in str(error)


@pytest.mark.parametrize("sleeps", [False, True])
def test_requests_of_calls_are_refused_where_turns_wait(make: Callable[..., RolloutEngine], sleeps: bool) -> None:
    server = make()
    server._vllm.loop.hold()
    (server._vllm.serving.sleep if sleeps else server._vllm.serving.pause)()
    server.start_turns([turn(1, [1]), turn(2, [1], waits=False)])
    ((key, error),) = server.take_turns(5.0)
    why = "it is asleep" if sleeps else "a weight update is in progress"
    assert key == 2 and type(error) is RolloutError and f"engine 4 cannot sample now: {why}" in str(error)
    assert server.take_turns(0.01) == []
    server._vllm.loop.release()
    assert isinstance(answers(server, 1)[1], Response)


@pytest.mark.parametrize("at_push", ["finish", "pause"])
def test_turns_may_pause_for_a_push_where_they_were_told_to_and_are_of_no_adapter_or_call(
    make: Callable[..., RolloutEngine], at_push: str
) -> None:
    stepper = AnsweringStepper()
    server = make(stepper, turns_at_push=at_push)
    server.start_turns([turn(1, [1], require_version=2), turn(2, [1], adapter=POET), turn(3, [1], waits=False)])
    answers(server, 3)
    plain, adapted, of_call = stepper.jobs
    assert (plain.pausable, adapted.pausable, of_call.pausable) == (at_push == "pause", False, False)
    assert (plain.require_version, adapted.adapter) == (2, POET)


def test_turns_that_are_given_up_have_what_they_had(make: Callable[..., RolloutEngine]) -> None:
    stepper = CountingStepper(room=1)
    stepper._completion = completion_with_log_probs(stepper)  # type: ignore[method-assign]
    server = make(stepper)
    server.start_turns([turn(1, [1]), turn(2, [1])])
    stepper.take(2)
    server.give_up_turns([2, 1, 99])
    stepper.allow(1)
    found = answers(server, 2)
    assert found[2] == Response([], [], "abort")
    assert found[1] == Response([10, 11, 12], [], "abort", (VersionSpan(3, 3),))
    server.give_up_turns([1, 2])
    assert server.take_turns(0.01) == []
    stepper.allow(1000)


def completion_with_log_probs(stepper: CountingStepper) -> Any:
    make = stepper._completion

    def completion(key: int, reason: str) -> Any:
        made = make(key, reason)
        made.output.logprobs = None
        return made

    return completion


def test_answers_are_taken_together_and_at_most_so_many(
    make: Callable[..., RolloutEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_MOST_ANSWERS", 3)
    server = make()
    assert server.take_turns(0.01) == []
    server.start_turns([turn(key, [1]) for key in range(5)])
    for _ in range(2):  # before the step that answers, and after it
        server._vllm.loop.call(lambda: None)
    assert [len(server.take_turns(0.01)) for _ in range(3)] == [3, 2, 0]


def test_a_turn_that_is_given_up_before_its_first_token_has_neither_routes_nor_a_mask(
    make: Callable[..., RolloutEngine],
) -> None:
    server = make(return_routed_experts=True, engine_args={"return_sampling_mask": True})
    output = SimpleNamespace(token_ids=(), logprobs=None, finish_reason="abort", routed_experts=None, sampling_mask=None)
    found = server._turns._response(turn(1, [1, 2])[1], Completion(output, 1))
    assert found == Response([], [], "abort", cached_tokens=1)
    assert (found.routes, found.sampling_mask, found.engine) == (None, None, 4)
