"""Products of groups of rows with a matrix for each group."""

from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.adapters import padded_product
from rl_backend.primitive.backward import weight_gradient

_ALIGNMENT = 16
_KERNEL_CAPABILITIES = (9, 10)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e].T`` for every group e; (N, in_features) -> (N, out_features).

    bfloat16 on CUDA devices of compute capability 9 and 10 takes torch's grouped matmul, which does not wait for the
    device; everything else copies ``counts`` to the host and takes one product for each group.

    Args:
        x: rows of group 0 first.
        weight: (E, out_features, in_features), of the dtype of ``x``.
        counts: (E,) int64, rows of each group; N in all.
    """
    function = _GroupedMatmul if _has_kernel(x, weight) else _GroupByGroup
    product: Tensor = function.apply(x, weight, counts)
    return product


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != x.dtype:
        return False
    # Rows that are not aligned go group by group in torch's kernel too.
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(x.device)[0] in _KERNEL_CAPABILITIES


def _on_host(counts: Tensor, num_rows: int) -> list[int]:
    # The meta device has no counts.
    return spread_evenly(num_rows, counts.shape[0]) if counts.is_meta else counts.tolist()


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(x, weight, counts, ends)
        ctx.weight = weight
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, counts, ends = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_x = F.grouped_mm(grad, weight, offs=ends) if needs_x else None

        def of_weight() -> Tensor:
            # torch does not say what a product over no rows leaves behind.
            return F.grouped_mm(grad.t(), x, offs=ends).masked_fill_((counts == 0)[:, None, None], 0.0)

        return grad_x, weight_gradient(ctx.weight, of_weight) if needs_weight else None, None


class _GroupByGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.counts = _on_host(counts, x.shape[0])
        out = x.new_empty(x.shape[0], weight.shape[1])
        for group, rows in _filled_groups(ctx.counts):
            torch.mm(x[rows], weight[group].t(), out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        groups = _filled_groups(ctx.counts)
        grad_x = None
        if needs_x:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for group, rows in groups:
                torch.mm(grad[rows], weight[group], out=grad_x[rows])

        def of_weight() -> Tensor:
            grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
            for group, rows in groups:
                torch.mm(grad[rows].t(), x[rows], out=grad_weight[group])
            for group, count in enumerate(ctx.counts):
                if count == 0:
                    grad_weight[group].zero_()
            return grad_weight

        return grad_x, weight_gradient(ctx.weight, of_weight) if needs_weight else None, None


def _filled_groups(counts: list[int]) -> list[tuple[int, slice]]:
    ends = accumulate(counts)
    return [(group, slice(end - count, end)) for group, (count, end) in enumerate(zip(counts, ends, strict=True)) if count]


def grouped_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """``x[rows of e] @ matrices[e]``, without a gradient; matrices (E, in, out)."""
    if _has_kernel(x, matrices):
        return F.grouped_mm(x.contiguous(), matrices, offs=counts.cumsum(0, dtype=torch.int32))
    y = x.new_empty(x.shape[0], matrices.shape[2])
    for group, rows in _filled_groups(_on_host(counts, x.shape[0])):
        y[rows] = padded_product(x[rows], matrices[group])
    return y


def spread_evenly(rows: int, groups: int) -> list[int]:
    """Rows of each group, as equal as they can be: what is planned with where nothing has been counted."""
    return [rows // groups + (group < rows % groups) for group in range(groups)]
