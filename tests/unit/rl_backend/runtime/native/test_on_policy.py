"""A step's only update, which gives its own old log-probs and asks for none of prompts, beside one with a pass before it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from rl_backend.algorithm.policy import grpo_loss
from rl_backend.algorithm.sequences import to_sequences, with_advantages, with_outputs
from rl_backend.contracts import TARGET_IDS, TokenSequence
from rl_backend.data import pack
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import gradients


class Response(NamedTuple):
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    sampling_mask: None = None

    def with_routes(self, sequence: TokenSequence) -> TokenSequence:
        return sequence


def samples() -> list[Response]:
    drawn = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(0, 128, (count,), generator=drawn).tolist()

    return [Response(ids(prompt), ids(n), [-4.5] * n) for prompt, n in ((5, 3), (5, 9), (2, 1), (2, 6))]


@pytest.mark.parametrize("options", [{}, {"tis_cap": 1.1, "entropy_coef": 0.01}])
def test_the_gradient_and_every_metric_are_those_of_a_pass_before_the_update(
    runtime: NativeRuntime, options: dict[str, float]
) -> None:
    sequences = with_advantages(to_sequences(samples()), [1.0, 0.0, 0.5, -1.0], "grpo", 2)
    whole = [
        TokenSequence(
            each.input_ids,
            {name: value for name, value in each.token_fields.items() if name != TARGET_IDS},
            each.sequence_fields,
        )
        for each in sequences
    ]
    handle = runtime.build_model()
    tokens = sum(float(each.token_fields["loss_mask"].sum()) for each in sequences)
    meta = {"temperature": 0.7, "calculate_entropy": True, "batch_num_tokens": tokens, "dp_size": 1}
    before = runtime.forward_backward(handle, [pack(whole, meta)], None, forward_only=True)
    whole = with_outputs(whole, {"old_log_probs": before.output("log_probs"), "old_entropy": before.output("entropy")})
    found = []
    for given, loss in (
        (whole, grpo_loss.with_options(**options)),
        (sequences, grpo_loss.with_options(on_policy=True, **options)),
    ):
        runtime.zero_grad(handle)
        parts = [pack(given[:1], meta), pack(given[1:], meta)]
        result = runtime.forward_backward(handle, parts, loss)
        found.append((gradients(handle), {name: metric.mean for name, metric in result.metrics.items()}))
    (expected, of_two_passes), (gradient, metrics) = found
    assert metrics.keys() == of_two_passes.keys() and {"entropy", "log_prob_gap", "rollout_kl"} <= metrics.keys()
    assert metrics == pytest.approx(of_two_passes, abs=2e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
