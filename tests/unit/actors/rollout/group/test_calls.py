"""Calls of engines: samples in the making, and outcomes of calls with a stand-in for Ray."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayTaskError

from actors.rollout.group import calls as calls_module
from actors.rollout.group.calls import PendingSamples, collect, outcome_of
from actors.rollout.messages import Response, VersionSpan
from rl_backend.contracts import BatchError, EngineDeadError, RolloutError


class Call:
    """A reference to a result."""

    def __init__(self, result: Any = None, *, done: bool = True) -> None:
        self.result, self.done = result, done


class Ray:
    """``ray``, as far as calls use it. ``now`` passes where one waits in vain."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wait(self, calls: list[Call], *, num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.done][:num_returns]
        if len(done) < num_returns:
            self.now += timeout
        return done, [call for call in calls if call not in done]

    def get(self, call: Call, timeout: float) -> Any:
        assert call.done
        if isinstance(call.result, Exception):
            raise call.result
        return call.result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(calls_module, "ray", made)
    return made


def response(*token_ids: int, version: int = 1, **facts: Any) -> Response:
    spans = (VersionSpan(version, len(token_ids)),)
    return Response(list(token_ids), [-0.1 * token for token in token_ids], "stop", spans, **facts)


class Pending:
    """Two responses to each of three prompts."""

    def __init__(self) -> None:
        self.answers: list[Future[Response]] = [Future() for _ in range(6)]
        of_prompts = [self.answers[start : start + 2] for start in (0, 2, 4)]
        self.samples = PendingSamples([[1], [2, 2], [3]], of_prompts)

    def answer(self, numbers: range, *answers: Response) -> None:
        for number, answer in zip(numbers, answers, strict=True):
            self.answers[number].set_result(answer)


@pytest.mark.parametrize("routed", [True, False])
def test_samples_are_in_the_callers_order_each_with_its_own_version_and_routes(routed: bool) -> None:
    versions = [1, 1, 2, 3, 5, 6]
    tokens = [(10,), (11, 12), (13,), (14, 15, 16), (17,), (18,)]
    rows = [1, 2, 2, 4, 1, 1]  # tokens of prompt and response, without the last
    routes = [np.full((count, 1, 1), number, dtype=np.uint8) for number, count in enumerate(rows)]
    masks = [np.full((len(each), 1), number, dtype=np.int32) for number, each in enumerate(tokens)]
    facts = [{"routes": rows, "sampling_mask": mask} for rows, mask in zip(routes, masks, strict=True)]
    answers = [
        response(*each, version=version, engine=4 if number < 4 else 7, **(facts[number] if routed else {}))
        for number, (each, version) in enumerate(zip(tokens, versions, strict=True))
    ]
    pending = Pending()
    pending.answer(range(5, -1, -1), *answers[::-1])
    found = pending.samples.result()
    assert [(each.prompt_index, each.sample_index) for each in found] == [
        (prompt, n) for prompt in range(3) for n in range(2)
    ]
    assert [each.prompt_ids for each in found] == [[1], [1], [2, 2], [2, 2], [3], [3]]
    assert [each.response_ids for each in found] == [[10], [11, 12], [13], [14, 15, 16], [17], [18]]
    assert [each.log_probs[0] for each in found] == [-0.1 * each.response_ids[0] for each in found]
    spans = [(VersionSpan(version, len(each.response_ids)),) for version, each in zip(versions, found, strict=True)]
    assert [each.version_spans for each in found] == spans
    assert [each.engine for each in found] == [4] * 4 + [7] * 2
    if routed:
        experts = [each.routes.experts.ravel().tolist() for each in found if each.routes is not None]
        assert experts == [[number] * count for number, count in enumerate(rows)]
        assert [each.routes.weight_version for each in found if each.routes is not None] == versions
        assert all(each.sampling_mask is mask for each, mask in zip(found, masks, strict=True))
    else:
        assert all(each.routes is None and each.sampling_mask is None for each in found)


def test_the_first_error_is_raised_again_and_what_is_still_sampled_is_given_up() -> None:
    pending = Pending()
    pending.answer(range(2), response(1), response(2))
    assert not pending.samples.done()
    pending.answers[4].set_exception(BatchError("too long"))
    assert pending.samples.done()
    for _ in range(2):
        with pytest.raises(BatchError, match="too long"):
            pending.samples.result()
    assert [each.cancelled() for each in pending.answers] == [False, False, True, True, False, True]
    assert pending.samples.done()


def test_a_caller_that_waits_no_longer_may_wait_again() -> None:
    pending = Pending()
    pending.answer(range(2), response(1), response(2))
    with pytest.raises(TimeoutError, match=r"4 of 6 samples have not been answered for 0\.01 s"):
        pending.samples.result(0.01)
    assert not any(each.cancelled() for each in pending.answers) and not pending.samples.done()
    pending.answer(range(2, 6), *(response(number) for number in (3, 4, 5, 6)))
    assert pending.samples.done()
    assert [each.response_ids for each in pending.samples.result(0.01)] == [[1], [2], [3], [4], [5], [6]]


@pytest.mark.usefixtures("ray")
def test_an_outcome_is_a_result_or_an_error_that_names_the_engine() -> None:
    refused = RayTaskError("load", "Traceback", BatchError("refused"))
    failed = RayTaskError("load", "Traceback", ValueError("of vLLM"))
    assert outcome_of(Call("answer"), "engine 3") == "answer"
    assert outcome_of(Call(refused), "engine 3") is refused.cause
    for error, kind, message in (
        (failed, RolloutError, "engine 3 failed with ValueError: of vLLM"),
        (ActorDiedError(), EngineDeadError, "engine 3 is dead: its process ended ("),
        (ObjectLostError("aa", None, ""), EngineDeadError, "engine 3 is dead: ObjectLostError"),
    ):
        outcome = outcome_of(Call(error), "engine 3")
        assert type(outcome) is kind and str(outcome).startswith(message)
        assert outcome.details["engine"] == "engine 3"


def test_every_call_has_an_outcome_and_who_does_not_answer_is_dead(ray: Ray) -> None:
    silent = Call(done=False)
    names = {2: "engine 2", 5: "engine 5"}
    found = collect({2: silent, 5: Call("answer")}, names, 30.0)
    assert list(found) == [2, 5] and found[5] == "answer" and ray.now == 1030.0
    assert isinstance(found[2], EngineDeadError) and "engine 2 did not answer for 30 s" in str(found[2])
    assert collect({}, {}, 30.0) == {}


def test_each_prompt_is_told_of_once_when_all_its_samples_are_there_or_have_failed() -> None:
    pending, told = Pending(), list[str]()
    pending.answer(range(1), response(1))
    pending.samples.when_answered(lambda: told.append("prompt"))
    assert not told
    pending.answer(range(1, 3), response(2), response(3))
    assert len(told) == 1
    pending.answers[3].set_exception(BatchError("too long"))
    pending.answers[4].cancel()
    assert len(told) == 2
    pending.answers[5].cancel()
    assert len(told) == 3


def test_a_sample_ends_with_a_stop_or_with_a_length_whatever_else_ended_it() -> None:
    pending = Pending()
    reasons: list[Any] = ["length", "abort", "stop", "length", "stop", "abort"]
    pending.answer(range(6), *(replace(response(number), finish_reason=reason) for number, reason in enumerate(reasons)))
    found = [sample.finish_reason for sample in pending.samples.result()]
    assert found == ["length", "length", "stop", "length", "stop", "length"]


def test_a_sample_has_the_version_of_each_of_its_tokens() -> None:
    pending = Pending()
    spans = (VersionSpan(3, 2), VersionSpan(5, 1), VersionSpan(3, 1))
    pending.answer(range(6), *(replace(response(*range(4)), spans=spans) for _ in range(6)))
    assert [sample.weight_versions for sample in pending.samples.result()] == [[3, 3, 5, 3]] * 6


def test_nothing_is_waited_for_where_nothing_was_asked() -> None:
    told: list[str] = []
    empty = PendingSamples([], [])
    empty.when_answered(lambda: told.append("prompt"))
    assert empty.done() and empty.result(0.0) == [] and not told


@pytest.mark.usefixtures("ray")
def test_the_reason_of_a_death_is_the_line_that_says_it() -> None:
    made = RayTaskError("__init__", "Traceback\n  line\nConfigError: no such model", ValueError("x"))
    in_init = outcome_of(Call(ActorDiedError(made)), "engine 3")
    assert str(in_init).startswith("engine 3 is dead: its process ended (") and "no such model" in str(in_init)
    assert "creation task" not in str(in_init)
    plain = ActorDiedError()
    plain.error_msg = "The actor died unexpectedly.\n\tclass_name: RolloutEngine"
    assert "(The actor died unexpectedly.); restart it" in str(outcome_of(Call(plain), "engine 3"))
    killed = outcome_of(Call(OutOfMemoryError("low")), "engine 3")
    assert isinstance(killed, EngineDeadError) and "ran out of memory, and Ray killed it" in str(killed)
    assert killed.details == {"engine": "engine 3"} and "OutOfMemoryError" not in str(killed)
