"""Root-mean-square normalisation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x ** 2) + eps)`` over the last dimension (Zhang and Sennrich, 2019).

    Shapes: (..., dim) -> (..., dim), in the dtype of ``x``; computed in float32 or better.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return normed

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm is one kernel on CUDA but a chain of saved temporaries elsewhere; this passes over memory less often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = inverse.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        normed: Tensor = (wide * inverse).mul_(weight)
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide_grad = _wide(grad)
        normed = _wide(x) * inverse
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


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
