"""Reductions over the tokens that a loss mask selects, safe against NaN and infinity elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def zero_masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``values`` with 0 where ``loss_mask`` is 0.

    Apply it to the inputs of an expression: a NaN that is masked only in the result still reaches the gradient, as 0 * NaN.

    Args:
        values: (T,) floating.
        loss_mask: (T,) bool, integer or floating.
    """
    return torch.where(loss_mask != 0, values, 0.0)


def masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    """0-d: sum of ``values * loss_mask``, where values at masked positions are never read."""
    return (zero_masked(values, loss_mask) * loss_mask).sum()


def token_mean_metric(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``values`` over the selected tokens as a metric: (sum, weight), both 0-d and detached."""
    return masked_sum(values.detach(), loss_mask), loss_mask.sum().to(values.dtype)
