"""Losses that come into the backward pass beside the caller's."""

from __future__ import annotations

import pytest
import torch

from rl_backend.primitive.backward import with_added_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_of_a_loss_comes_in_whole_whatever_the_callers_gradient(dtype: torch.dtype) -> None:
    x, y = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor(5.0, dtype=dtype, requires_grad=True)
    output = with_added_loss(x * 4.0, y.square())
    assert output.tolist() == [8.0, 12.0]
    (output * torch.tensor([7.0, 0.0])).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert x.grad.tolist() == [28.0, 0.0] and float(y.grad) == 10.0 and y.grad.dtype == dtype


def test_two_losses_are_both_added() -> None:
    x, y = torch.tensor([2.0], requires_grad=True), torch.tensor(5.0, requires_grad=True)
    output = with_added_loss(with_added_loss(x, 3.0 * y), y.square())
    output.sum().backward()
    assert y.grad is not None and float(y.grad) == 13.0
