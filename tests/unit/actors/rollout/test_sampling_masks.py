"""Masks that vLLM returns, from its own classes to the trainer's log-probs, which are over the same words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, SamplingMask

from actors.rollout.messages import Response, Sample, VersionSpan, mask_of
from rl_backend.algorithm import grpo_loss
from rl_backend.algorithm.sequences import to_sequences, with_advantages, with_outputs
from rl_backend.contracts import BatchError, RolloutError, SamplingCuts
from rl_backend.data import pack_plan, plan_micro_batches
from tests.support.families import load_transformers
from tests.support.models import write_tiny
from tests.support.native import open_in_float64
from tests.support.token_cuts import kept_by_vllm, mask_beside

CUTS, TEMPERATURE = SamplingCuts(top_p=0.9, top_k=40), 0.8


def completion(*words: list[int], tokens: tuple[int, ...] = (7, 2)) -> CompletionOutput:
    return CompletionOutput(0, "", tokens, None, None, sampling_mask=SamplingMask(list(words)) if words else None)


def test_the_mask_of_a_response_is_of_one_width_and_in_order() -> None:
    mask = mask_of(completion([9, 7, 0], [2]), "engine 0")
    assert mask.dtype == np.int32 and mask.tolist() == [[0, 7, 9], [2, -1, -1]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (completion(), "engine 3: vLLM returned no mask for a response of 2"),
        (completion([7]), "engine 3: vLLM returned a mask of 1 tokens for a response of 2"),
        (completion([7], [7, 3]), "engine 3: response token 1 is 2, and its mask of 2 words has no such word"),
        (completion([7], []), "response token 1 is 2, and its mask of 0 words"),
    ],
)
def test_a_mask_that_is_not_of_its_tokens_is_refused(given: CompletionOutput, message: str) -> None:
    with pytest.raises(RolloutError, match=message) as refused:
        mask_of(given, "engine 3")
    assert refused.value.details == {"engine": "engine 3"}


def sample(prompt: list[int], response: list[int], logits: Tensor, seed: int) -> Sample:
    """As an engine with these logits would have sampled it, from words near those of ``CUTS``."""
    labels = torch.tensor(response)
    mask, flat = mask_beside(logits, labels, CUTS, seed), FlatLogprobs()
    # vLLM promises no order.
    words = [[word for word in row if word >= 0][::-1] for row in mask.tolist()]
    for token, own, row in zip(response, words, logits, strict=True):
        flat.append({token: Logprob(float(row[token] - row[own].logsumexp(0)), 1, None)})
    made = CompletionOutput(0, "", response, None, flat, finish_reason="length", sampling_mask=SamplingMask(words))
    answer = Response.of(made, "engine 0")
    spans = (VersionSpan(1, len(response)),)
    return Sample(0, 0, prompt, answer.token_ids, answer.log_probs, "length", spans, 0, None, mask_of(made, "engine 0"))


@pytest.mark.shows(
    "model: log-probs over vLLM's own sampling masks, read from its CompletionOutput, are those it was sampled with"
)
def test_log_probs_of_samples_are_over_the_words_that_the_engine_sampled_from(tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path)
    reference, samples, shares = load_transformers(model).double(), [], []
    for seed, (prompt, response) in enumerate([([5, 9, 11], [3, 1, 4, 1, 5]), ([5, 9], [26]), ([8], [2, 7, 1])]):
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        samples.append(sample(prompt, response, logits, seed))
        own, masks = kept_by_vllm(logits, CUTS), samples[-1].sampling_mask
        assert masks is not None
        for kept, words in zip(own, masks.tolist(), strict=True):
            both = {*kept.nonzero()[:, 0].tolist()}, {*words} - {-1}
            shares.append(1 - len(both[0] & both[1]) / len(both[0] | both[1]))
    sequences = with_advantages(to_sequences(samples), [1.0, 0.0, 0.5], "grpo", 3)
    meta = {"temperature": TEMPERATURE, **CUTS._replace(mask=None)._asdict(), "calculate_entropy": False}
    with open_in_float64(model) as runtime:
        handle = runtime.build_model()
        (data,) = pack_plan(sequences, plan_micro_batches([len(each) for each in sequences], 1, 64), meta)
        old = runtime.forward_backward(handle, data, None, forward_only=True).output("log_probs")
        sequences = with_outputs(sequences, {"old_log_probs": old})
        (data,) = pack_plan(sequences, plan_micro_batches([len(each) for each in sequences], 1, 64), meta)
        result = runtime.forward_backward(handle, data, grpo_loss)
    assert result.metrics["log_prob_gap"].mean < 1e-6, "sampled ones come in float32"
    assert result.metrics["mask_disagreement"].mean == pytest.approx(sum(shares) / len(shares))
    assert 0.1 < result.metrics["mask_disagreement"].mean < 0.9


def test_masks_of_some_samples_alone_are_refused() -> None:
    spans = (VersionSpan(1, 1),)
    plain, masked = (Sample(0, 0, [1], [2], [-0.5], "stop", spans, 0, None, mask) for mask in (None, np.array([[2]])))
    with pytest.raises(BatchError, match="1 of 2 samples have a mask: take all from engines with return_sampling_mask"):
        to_sequences([plain, masked])
    assert "sampling_mask" not in to_sequences([plain])[0].token_fields
    wide = Sample(0, 0, [1, 4], [2, 3], [-0.5, 0.0], "stop", spans, 0, None, np.array([[1, 2], [3, -1]], dtype=np.int32))
    found = [each.token_fields["sampling_mask"].tolist() for each in to_sequences([masked, wide])]
    assert found == [[[2, -1], [-1, -1]], [[-1, -1], [1, 2], [3, -1], [-1, -1]]]
