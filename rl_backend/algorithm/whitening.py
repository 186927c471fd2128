"""Mean 0 and variance 1 over the selected tokens of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_backend.algorithm.sequences import check_finite
from rl_backend.contracts import BatchError


def masked_whiten(values: Tensor, loss_mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``(values - mean) / sqrt(variance + 1e-8)`` over the selected tokens, with the unbiased variance.

    The batch must be whole: all sequences of all ranks in this step. Equal values become 0. The arithmetic is done in
    float64. Source: verl's ``masked_whiten``.

    Args:
        values: (T,) floating, without a gradient.
        loss_mask: (T,); selects where it is not 0.
        shift_mean: False puts the mean back after the scaling.

    Returns:
        (T,) in the dtype of ``values``, 0 where ``loss_mask`` is 0.

    Raises:
        BatchError: fewer than two selected tokens, or a selected value that is not finite.
    """
    if values.dim() != 1 or values.shape != loss_mask.shape:
        raise BatchError(
            f"values has shape {tuple(values.shape)} and loss_mask {tuple(loss_mask.shape)}; expected (T,) and the same"
        )
    check_finite(loss_mask, values=values)
    chosen = values.detach()[loss_mask != 0].to(torch.float64)
    if chosen.numel() < 2:
        raise BatchError(f"loss_mask selects {chosen.numel()} tokens; a variance needs at least 2")
    variance, mean = torch.var_mean(chosen)
    whitened = (chosen - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.zeros_like(values.detach()).masked_scatter(loss_mask != 0, whitened.to(values.dtype))
