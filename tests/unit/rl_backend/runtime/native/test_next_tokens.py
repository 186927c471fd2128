"""Next tokens given as targets, beside sequences without targets."""

from __future__ import annotations

import torch

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import TARGET_IDS, TokenSequence
from rl_backend.data import pack
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import VOCAB_SIZE, gradients


def test_next_tokens_as_targets_are_the_bits_of_no_targets(runtime: NativeRuntime) -> None:
    drawn = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, VOCAB_SIZE, (length,), generator=drawn) for length in (7, 2, 40, 1)]
    handle = runtime.build_model()
    found = []
    for given in (False, True):
        sequences = []
        for ids in rows:
            fields = {"loss_mask": torch.ones(len(ids))}
            if given:
                fields[TARGET_IDS] = torch.cat((ids[1:], torch.tensor([-100])))
            sequences.append(TokenSequence(ids, fields))
        runtime.zero_grad(handle)
        result = runtime.forward_backward(
            handle, [pack(sequences, {"temperature": 0.7, "dp_size": 1, "batch_num_tokens": 46.0})], sft_loss
        )
        found.append((result.loss, result.output("log_probs"), gradients(handle)))
    (loss, log_probs, gradient), (other_loss, others, other_gradient) = found
    assert loss == other_loss
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(log_probs, others, strict=True))
    assert all(torch.equal(gradient[name], other_gradient[name]) for name in gradient)
