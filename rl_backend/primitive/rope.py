"""Rotary position embedding in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_cos_sin(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles (Su et al., 2021).

    Frequencies are computed here, in float32, rather than kept in a buffer: there is nothing to restore after a model was
    built on the meta device.

    Args:
        position_ids: (T,) integers.
        theta: base of the frequencies.

    Returns:
        two (T, 1, head_dim) tensors of ``dtype``; the second half of the last dimension repeats the first.
    """
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device).to(torch.float32) / head_dim
    angles = position_ids.to(torch.float32)[:, None] * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (T, heads, head_dim) by the angles of :func:`rotary_cos_sin`."""
    rotated: Tensor = _Rotary.apply(x, cos, sin)
    return rotated


class _Rotary(torch.autograd.Function):
    """Three kernels and one output, forward and backward; the usual form concatenates and negates halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, sign=1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, sign=-1.0), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return rotated
