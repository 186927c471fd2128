"""Auxiliary losses, beside the one that a caller computes from a model's outputs."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_added_loss(output: Tensor, loss: Tensor) -> Tensor:
    """``output``, with which the gradient of ``loss`` comes into the backward pass; no value that is seen changes.

    Args:
        loss: 0-d.
    """
    added: Tensor = _WithLoss.apply(output, loss)
    return added


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=ctx.loss_dtype)
