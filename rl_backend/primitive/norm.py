"""Normalisation over the last dimension."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.float32 import widened


@dataclass(frozen=True)
class NormSpec:
    """Which norm a model has: :class:`RMSNorm` or :class:`LayerNorm`."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"  # ``rms`` for :class:`RMSNorm`, ``layer`` for :class:`LayerNorm`
    from_one: bool = False  # whether weights are stored as differences from 1, as those of Gemma and Nemotron are
    bias: bool = False  # whether a ``layer`` norm has one

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)

    def build(self, dim: int) -> "RMSNorm | LayerNorm":
        if self.kind == "layer":
            return LayerNorm(dim, self.eps, bias=self.bias, from_one=self.from_one)
        return RMSNorm(dim, self.eps, from_one=self.from_one)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last dimension (Zhang and Sennrich, 2019).

    (..., dim) -> (..., dim), in the dtype of ``x``; computed in float32 or better. With ``from_one`` the parameter is the
    weight's difference from 1. ``sum_over_ranks`` adds up over the ranks that have the other features, with gradients.
    """

    def __init__(self, dim: int, eps: float, *, from_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if from_one else torch.ones(dim))
        self.dim = dim
        self.eps = eps
        self.from_one = from_one
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = widened(self.weight) + 1.0 if self.from_one else self.weight
        if self.sum_over_ranks is not None:
            wide = widened(x)
            squares = self.sum_over_ranks(wide.square().sum(-1, keepdim=True))
            return (wide * (squares / self.dim + self.eps).rsqrt() * weight).to(x.dtype)
        # Compiled code has no need of kernels that pass over memory less often.
        if x.is_cuda or torch.compiler.is_compiling():
            if weight.dtype != x.dtype:
                return F.rms_norm(widened(x), weight.shape, weight, self.eps).to(x.dtype)
            return F.rms_norm(x, weight.shape, weight, self.eps)
        normed: Tensor = _RMSNorm.apply(x, weight, self.eps)
        return normed

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class LayerNorm(nn.Module):
    """``weight * (x - mean(x)) / sqrt(var(x) + eps) + bias`` over the last dimension (Ba et al., arXiv 1607.06450)."""

    def __init__(self, dim: int, eps: float, *, bias: bool = True, from_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim) if from_one else torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps
        self.from_one = from_one

    def forward(self, x: Tensor) -> Tensor:
        weight = (widened(self.weight) + 1.0).to(x.dtype) if self.from_one else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm is one kernel on CUDA but a chain of saved temporaries elsewhere; this passes over memory less often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = widened(x)
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (wide * inverse).mul_(weight)
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide_grad = widened(grad)
        normed = widened(x) * inverse
        product = wide_grad * normed
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
            projection = torch.mv(product.flatten(0, -2), weight.to(product.dtype)).view(inverse.shape)
        else:
            # Above a frozen model rows may be different tenants': one must not depend on how many others there are.
            grad_weight = None
            projection = (product * weight).sum(-1, keepdim=True)
        projection.div_(x.shape[-1])
        grad_x = torch.mul(wide_grad, weight, out=product)
        grad_x.addcmul_(normed, projection, value=-1.0).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None
