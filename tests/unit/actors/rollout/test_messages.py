"""What an engine makes of vLLM's completions."""

from __future__ import annotations

import math

import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput

from actors.rollout.messages import Response
from rl_backend.contracts import RolloutError


def completion(*log_probs: float) -> CompletionOutput:
    flat = FlatLogprobs()
    for token, value in enumerate(log_probs):
        # The sampled token comes first, the best others behind it.
        flat.append({token: Logprob(value, 1, None), 99: Logprob(-math.inf, 2, None)})
    return CompletionOutput(0, "", list(range(len(log_probs))), None, flat, finish_reason="stop")


def test_a_response_has_the_log_probs_of_its_tokens() -> None:
    assert Response.of(completion(-0.5, 0.0), "engine 0") == Response([0, 1], [-0.5, 0.0], "stop")


@pytest.mark.shows("failures: an engine that samples a token with a log-prob of NaN or infinity is refused by its number")
@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf])
def test_a_log_prob_that_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(RolloutError, match=f"engine 3: response token 1 was sampled with log-prob {wrong}: the engine"):
        Response.of(completion(-0.5, wrong, -0.1), "engine 3")


@pytest.mark.parametrize(
    ("reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), (None, "length")]
)
def test_a_response_without_log_probs_has_none_and_ends_as_vllm_says(reason: str | None, finish: str) -> None:
    made = CompletionOutput(0, "", (4, 5), None, None, finish_reason=reason)
    assert Response.of(made, "engine 0") == Response([4, 5], [], finish)  # type: ignore[arg-type]


def test_the_first_of_several_wrong_log_probs_is_named() -> None:
    with pytest.raises(RolloutError, match="response token 0 was sampled with log-prob nan") as wrong:
        Response.of(completion(math.nan, -0.5, math.inf), "engine 2")
    assert wrong.value.details == {"engine": "engine 2"}
