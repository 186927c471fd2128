"""An episode of verifiers from our side and from the process that plays it, with stand-ins for verifiers itself."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.verifiers import child
from adapters.verifiers.player import STOPS, TokenEndpoint, _answer, _result
from rl_backend.contracts import BatchError, ConfigError, EpisodeEndError
from tests.support.verifiers_settings import SETTINGS


def turn(*token_ids: int, finish: str = "stop") -> Any:
    return SimpleNamespace(token_ids=token_ids, log_probs=[-each / 10 for each in token_ids], finish=finish)


def branch(ids: list[int], sampled: list[bool]) -> dict[str, Any]:
    return {"token_ids": ids, "sampled": sampled}


def trace(**changes: Any) -> dict[str, Any]:
    return {"agent": "a", "reward": 0.5, "metrics": {"won": True}, "stop": None, "branches": [], **changes}


def session(**changes: Any) -> Any:
    return SimpleNamespace(**{"failed": None, "ended": None, "turns": [], **changes})


def test_the_result_is_that_of_the_only_trace() -> None:
    found = _result({"errors": [], "traces": [trace(stop="max_turns", metrics={"won": True, "n": 3})]}, session())
    assert (found.reward, found.metrics, found.stop) == (0.5, {"won": 1.0, "n": 3.0}, "turns")
    assert found.error == "verifiers' own limit: max_turns"
    for stop, expected in STOPS.items():
        assert _result({"errors": [], "traces": [trace(stop=stop)]}, session()).stop == expected
    done = _result({"errors": [], "traces": [trace(stop="won")]}, session())
    assert (done.stop, done.error) == ("done", "")
    failed = _result({"errors": ["A: b", "C: d"]}, session())
    assert (failed.stop, failed.error, failed.reward) == ("error", "A: b; C: d", 0.0)


def test_what_ended_an_episode_on_our_side_goes_before_what_verifiers_says() -> None:
    played = {"errors": ["theirs"], "traces": []}
    ended, failed = EpisodeEndError("limits.turns=1", stop="turns"), RuntimeError("engine")
    with pytest.raises(RuntimeError, match="engine"):
        _result(played, session(failed=failed, ended=ended))
    with pytest.raises(EpisodeEndError, match=r"limits\.turns=1"):
        _result(played, session(ended=ended))


@pytest.mark.parametrize("agents", [[], ["solver", "judge"]])
def test_an_episode_of_several_agents_or_of_none_is_refused(agents: list[str]) -> None:
    played = {"errors": [], "traces": [trace(agent=agent) for agent in agents]}
    with pytest.raises(BatchError, match=rf"an episode of the agents {', '.join(agents)}; only environments in which one"):
        _result(played, session())


TURNS = [([1, 2], turn(3, 4)), ([1, 2, 3, 4, 9], turn(5))]


@pytest.mark.parametrize(
    ("branches", "problem"),
    [
        ([branch([1, 2, 3, 4, 9, 5, 8], [False, False, True, True, False, True, False])], None),
        (
            [
                branch([1, 2, 3, 4], [False, False, True, True]),
                branch([1, 2, 3, 4, 9, 5], [False, False, False, False, False, True]),
            ],
            None,
        ),
        ([branch([1, 2, 3, 4, 9, 6], [False, False, True, True, False, True])], "the 1 tokens that were sampled after 5"),
        ([branch([1, 2, 3, 4, 9, 5], [False, False, True, False, False, True])], "the 2 tokens that were sampled after 2"),
        ([branch([1, 7, 3, 4, 9, 5], [False, False, True, True, False, True])], "the 2 tokens that were sampled after 2"),
        ([branch([1, 2, 3, 4], [False, False, True, True])], "the 1 tokens that were sampled after 5"),
        ([], "the 2 tokens that were sampled after 2"),
    ],
)
def test_every_turn_must_be_in_a_branch_with_its_ids_as_sampled(branches: list[Any], problem: str | None) -> None:
    played = {"errors": [], "traces": [trace(branches=branches)]}
    if problem is None:
        assert _result(played, session(turns=TURNS)).stop == "done"
        return
    with pytest.raises(BatchError, match=f"verifiers reports no branch with {problem}"):
        _result(played, session(turns=TURNS))


def test_an_answer_has_the_log_prob_of_each_token_and_an_id_of_its_own() -> None:
    first, second = _answer(turn(3, 4, finish="length")), _answer(turn())
    (choice,) = first["choices"]
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, [3, 4], "length")
    content = [{"token": "token_id:3", "logprob": -0.3}, {"token": "token_id:4", "logprob": -0.4}]
    assert choice["logprobs"] == {"content": content}
    assert first["request_id"] != second["request_id"]
    with pytest.raises(ValueError, match="zip"):
        _answer(SimpleNamespace(token_ids=[1, 2], log_probs=[-0.1], finish="stop"))  # type: ignore[arg-type]


def test_each_role_has_our_harness_unless_the_environment_says_otherwise() -> None:
    found = SETTINGS.configured()
    assert found == {
        "taskset": {"id": "mine"},
        "player": {"harness": {"id": "rl_backend_chat"}, "runtime": {"type": "subprocess"}},
        "judge": {"harness": {"id": "own"}, "runtime": {"type": "subprocess"}},
    }
    assert SETTINGS.environment == {"taskset": {"id": "mine"}, "judge": {"harness": {"id": "own"}}}
    for field, value in (("most_tasks", 0), ("start_seconds", 0.0)):
        with pytest.raises(ConfigError, match=f"VerifiersSettings.{field}={value}"):
            SETTINGS.replace(**{field: value})


class Sampler:
    """Samples what is written, and notes what it is asked for."""

    def __init__(self, *turns: Any) -> None:
        self.turns, self.asked = list(turns), list[tuple[Any, ...]]()

    async def sample(self, prompt: list[int], *, stop_token_ids: Any, max_tokens: int | None) -> Any:
        self.asked.append((prompt, stop_token_ids, max_tokens))
        found = self.turns.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Request:
    """What the endpoint reads of a request."""

    def __init__(self, token: str, **body: Any) -> None:
        self.headers, self.body = {child.TOKEN_HEADER: token}, body

    async def json(self) -> Any:
        return self.body


def asked(endpoint: TokenEndpoint, token: str, **body: Any) -> Any:
    async def answer() -> tuple[int, Any]:
        response = await endpoint._generate(Request(token, **body))  # type: ignore[arg-type]
        return response.status, json.loads(response.text or "")

    return answer()


def test_requests_are_sampled_with_both_kinds_of_stops_and_errors_end_the_episode() -> None:
    async def run() -> None:
        endpoint = TokenEndpoint(64, stop_token_ids=[7, 8])
        sampler: Any = Sampler(turn(1), turn(2), EpisodeEndError("limits.turns=2", stop="turns"), RuntimeError("engine"))
        with endpoint.session(sampler) as (token, found):
            sampling = {"stop_token_ids": [8, 9], "max_tokens": 5, "temperature": None, "skip_special_tokens": False}
            assert (await asked(endpoint, token, token_ids=["4", 5], sampling_params=sampling))[0] == 200
            assert (await asked(endpoint, token, token_ids=[6], sampling_params={"stop_token_ids": None}))[0] == 200
            assert sampler.asked == [([4, 5], [8, 9, 7], 5), ([6], [7, 8], None)]
            assert [prompt for prompt, _ in found.turns] == [[4, 5], [6]] and found.turns[1][1].token_ids == (2,)
            status, answer = await asked(endpoint, token, token_ids=[1])
            assert (status, answer["error"]) == (
                400,
                {"message": "limits.turns=2", "type": "invalid_request_error", "code": 400},
            )
            assert found.failed is None and found.ended is not None
            status, answer = await asked(endpoint, token, token_ids=[1])
            assert (status, answer["error"]["message"]) == (400, "RuntimeError: engine")
            assert isinstance(found.failed, RuntimeError) and len(found.turns) == 2 and not found.sampling
        assert found.over and not endpoint._sessions

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"sampling_params": {"top_p": 0.5, "logit_bias": {}}}, "logit_bias, top_p: set by the run, leave it out"),
        ({"features": []}, "models are sampled with text alone"),
        ({"content_parts": None}, "models are sampled with text alone"),
    ],
)
def test_what_would_be_ignored_fails_the_episode(body: dict[str, Any], problem: str) -> None:
    async def run() -> None:
        endpoint, sampler = TokenEndpoint(64), Sampler()
        with endpoint.session(sampler) as (token, found):  # type: ignore[arg-type]
            status, answer = await asked(endpoint, token, token_ids=[1], **body)
            assert (status, answer["error"]["message"]) == (400, f"verifiers asked for {problem}")
            assert isinstance(found.failed, BatchError) and not sampler.asked

    asyncio.run(run())
