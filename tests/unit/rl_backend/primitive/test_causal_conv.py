"""The packed causal convolution against torch's own, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive.causal_conv import causal_conv

CHANNELS, WIDTH = 6, 4


def one_by_one(x: Tensor, weight: Tensor, seq_lens: Sequence[int], history: Tensor | None = None) -> Tensor:
    outputs = []
    for index, rows in enumerate(x.split(list(seq_lens))):
        before = rows.new_zeros(WIDTH - 1, CHANNELS) if history is None else history[index]
        whole = torch.cat((before, rows)).t()[None]
        outputs.append(F.conv1d(whole, weight, groups=CHANNELS)[0].t())
    return torch.cat(outputs)


@pytest.mark.parametrize("seq_lens", [(1,), (9,), (1, 1, 2, 3, 4, 30), (5, 1, 7)], ids=str)
@pytest.mark.parametrize("with_history", [False, True])
def test_outputs_and_gradients_are_those_of_each_sequence_alone(seq_lens: tuple[int, ...], with_history: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    leaves = [random(sum(seq_lens), CHANNELS), random(CHANNELS, 1, WIDTH)]
    history = random(len(seq_lens), WIDTH - 1, CHANNELS) if with_history else None
    leaves += [history] if history is not None else []
    mix = random(sum(seq_lens), CHANNELS).detach()
    found, expected = (convolve(leaves[0], leaves[1], seq_lens, history) for convolve in (causal_conv, one_by_one))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((output * mix).sum(), leaves) for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_bfloat16_is_rounded_once() -> None:
    x, weight = torch.randn(40, CHANNELS).bfloat16(), torch.randn(CHANNELS, 1, WIDTH).bfloat16()
    exact = one_by_one(x.float(), weight.float(), (17, 23))
    assert torch.equal(causal_conv(x, weight, (17, 23)), exact.bfloat16())
