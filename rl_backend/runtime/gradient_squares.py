"""Squares of gradients, added up without loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 2**20
"""Elements that are converted to float64 at a time."""


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Sum over all elements of all tensors, () float64; the tensors must be on one device, with at least one element.

    A float32 sum over a large tensor would be too small: a CPU adds its elements one after the other, and what is added is
    rounded to what is there already. A tensor is not converted as a whole, which would take twice its size in float32.
    """
    chunks = [chunk for gradient in gradients for chunk in gradient.detach().reshape(-1).split(_CHUNK) if chunk.numel()]
    return torch.stack(torch._foreach_norm(chunks, 2, dtype=torch.float64)).square().sum()
