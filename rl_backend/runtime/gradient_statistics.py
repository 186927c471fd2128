"""The norm of a gradient whose shards lie on all ranks, its zeros, and the result of a step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from rl_backend.contracts import StepResult

_CHUNK = 2**20
"""Elements that are converted to float64 at a time."""


def rank_statistics(gradients: Iterable[Tensor], device: torch.device, *, count_zeros: bool) -> Tensor:
    """(1, 2) float64: squared 2-norm of this rank's gradients, and their zeros, 0 unless they are counted."""
    filled = [gradient for gradient in gradients if gradient.numel()]
    statistics = torch.zeros(1, 2, dtype=torch.float64, device=device)
    if filled:
        statistics[0, 0] = sum_of_squares(filled)
        if count_zeros:
            statistics[0, 1] = torch.stack([gradient.numel() - gradient.count_nonzero() for gradient in filled]).sum()
    return statistics


def step_result(rows: Tensor, *, count_zeros: bool) -> StepResult:
    """Norm and zeros of the whole gradient, from all ranks' :func:`rank_statistics`, and whether a step may be taken.

    The sums are exact, so neither the order of the ranks nor the layout makes a difference.
    """
    squares, zeros = (math.fsum(column) for column in rows.T.tolist())
    norm = math.sqrt(squares)
    return StepResult(math.isfinite(norm), norm, int(zeros) if count_zeros else None)


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum over all elements of all tensors, () float64; the tensors must be on one device, with at least one element.

    A float32 sum over a large tensor would be too small: a CPU adds its elements one after the other, and what is added is
    rounded to what is there already. A tensor is not converted as a whole, which would take twice its size in float32.
    """
    chunks = [chunk for gradient in gradients for chunk in gradient.detach().reshape(-1).split(_CHUNK) if chunk.numel()]
    return torch.stack(torch._foreach_norm(chunks, 2, dtype=torch.float64)).square().sum()
