"""Calls of engines, with a stand-in for Ray: answers in any order, errors, and engines that never answer."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

from actors.rollout.group import calls as calls_module
from actors.rollout.group.calls import PendingSamples, SamplingCalls, collect, outcome_of
from actors.rollout.messages import Generated, Response, VersionSpan
from rl_backend.contracts import BatchError, EngineDeadError, EngineDirtyError, RLBackendError, RolloutError


class Call:
    """A reference to a result."""

    def __init__(self, result: Any = None, *, done: bool = True) -> None:
        self.result, self.done = result, done


class Ray:
    """``ray``, as far as calls use it. ``now`` passes where one waits in vain."""

    def __init__(self) -> None:
        self.now = 1000.0

    def wait(
        self, calls: list[Call], *, num_returns: int, timeout: float | None, fetch_local: bool = True
    ) -> tuple[list[Call], list[Call]]:
        done = [call for call in calls if call.done][:num_returns]
        if len(done) < num_returns:
            assert timeout is not None, "it would wait for ever"
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
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    return made


def response(*token_ids: int, version: int = 1) -> Response:
    spans = (VersionSpan(version, len(token_ids)),)
    return Response(list(token_ids), [-0.1 * token for token in token_ids], "stop", spans)


class Pending:
    """Two prompts on engine 4, one on engine 7, two responses of each."""

    def __init__(self, first: Call, second: Call, limit: float = 60.0) -> None:
        self.noted: list[tuple[Any, ...]] = []
        self.spare: Call | None = None
        self.asked: list[range] = []
        self.calls = SamplingCalls(limit)
        prompts = [[1], [2, 2], [3]]
        self.samples = PendingSamples(prompts, 2, self.calls, lambda *noted: self.noted.append(noted), self.ask_again)
        for call, engine, share in ((first, 4, range(2)), (second, 7, range(2, 3))):
            self.samples.add(call, engine, share, f"actor of {engine}")
            self.calls.add(engine, call)

    def ask_again(self, samples: PendingSamples, prompts: range, error: RLBackendError) -> None:
        """Engine 9 answers, if it can."""
        if self.spare is None:
            raise error
        self.asked.append(prompts)
        samples.add(self.spare, 9, prompts, "actor of 9")
        self.calls.add(9, self.spare)


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.usefixtures("ray")
def test_samples_are_in_the_callers_order_each_with_its_own_version_and_routes(routed: bool) -> None:
    versions = [1, 1, 2, 3, 5, 6]
    tokens = [(10,), (11, 12), (13,), (14, 15, 16), (17,), (18,)]
    answers = [response(*each, version=version) for each, version in zip(tokens, versions, strict=True)]
    first, second = Generated(answers[:4], None), Generated(answers[4:], None)
    rows = [1, 2, 2, 4]  # tokens of prompt and response, without the last
    if routed:
        first = first._replace(routes=np.arange(sum(rows), dtype=np.uint8).reshape(-1, 1, 1))
        second = second._replace(routes=np.array([90, 91], dtype=np.uint8).reshape(-1, 1, 1))
    found = Pending(Call(first), Call(second)).samples.result()
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
        assert experts == [[0], [1, 2], [3, 4], [5, 6, 7, 8], [90], [91]]
        assert [each.routes.weight_version for each in found if each.routes is not None] == versions
    else:
        assert all(each.routes is None for each in found)


def test_the_first_error_is_raised_again_and_the_engine_that_it_is_of_is_told() -> None:
    late = Call(done=False)
    error = RayTaskError("generate", "Traceback of the actor", BatchError("too long"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls_module, "ray", Ray())
        pending = Pending(late, Call(error))
        assert not pending.samples.done()
        for _ in range(2):
            with pytest.raises(BatchError, match="too long"):
                pending.samples.result()
        assert pending.samples.done()
    ((engine, outcome, actor),) = pending.noted
    assert (engine, actor) == (7, "actor of 7") and isinstance(outcome, BatchError)


def test_a_caller_that_waits_no_longer_may_wait_again(ray: Ray) -> None:
    answer = Generated([response(1), response(2)], None)
    late = Call(Generated([response(3), response(4)] * 2, None), done=False)
    pending = Pending(late, Call(answer))
    with pytest.raises(TimeoutError, match="no engine answered for 5 s"):
        pending.samples.result(5.0)
    assert ray.now == 1005.0 and not pending.noted
    late.done = True
    assert [each.response_ids for each in pending.samples.result(5.0)] == [[3], [4], [3], [4], [1], [2]]


@pytest.mark.parametrize("error", [EngineDirtyError("engine 4 is dirty"), ActorDiedError()])
def test_what_a_lost_engine_was_asked_is_asked_again_and_the_rest_is_not(ray: Ray, error: Exception) -> None:
    lost = error if isinstance(error, ActorDiedError) else RayTaskError("generate", "Traceback", error)
    pending = Pending(Call(lost), Call(Generated([response(5), response(6)], None)))
    pending.spare = Call(Generated([response(each) for each in (1, 2, 3, 4)], None))
    found = pending.samples.result()
    assert [each.response_ids for each in found] == [[1], [2], [3], [4], [5], [6]]
    assert [each.engine for each in found] == [9] * 4 + [7] * 2 and pending.asked == [range(2)]
    ((engine, outcome, actor),) = pending.noted
    assert (engine, actor) == (4, "actor of 4") and isinstance(outcome, EngineDeadError | EngineDirtyError)


def test_an_engine_that_never_answers_is_dead_after_the_limit_of_one_call(ray: Ray) -> None:
    pending = Pending(Call(done=False), Call(Generated([response(1), response(2)], None)), limit=60.0)
    with pytest.raises(EngineDeadError, match="engine 4 has not answered a call to sample for 60 s"):
        pending.samples.result()
    assert ray.now == 1060.0 and [engine for engine, *_ in pending.noted] == [4]


def test_the_time_of_a_call_begins_when_the_one_before_it_has_ended(ray: Ray) -> None:
    calls = SamplingCalls(60.0)
    first, second, other = Call(done=False), Call(done=False), Call(done=False)
    calls.add(0, first)
    calls.add(0, second)
    calls.add(1, other)
    ray.now += 50
    first.done = other.done = True
    assert calls.wait([1]) == {}
    assert calls._left(0) == 60
    ray.now += 20
    late = Call(done=False)
    calls.add(1, late)
    hanging = calls.wait([0, 1])
    assert set(hanging) == {0, 1} and ray.now == 1130.0
    assert "engine 1 has not answered" in str(hanging[1]) and calls.wait([2]) == {}


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
