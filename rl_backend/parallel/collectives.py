"""Collectives over the first dimension that the backward pass goes through."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch 2.13 has new names for these two and warns of the old ones.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group=): the inputs of all ranks one after the other, without a backward pass."""
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], object]:
    """A function that adds a tensor up over the ranks of ``group``, in place and without a backward pass. A collective."""
    return partial(dist.all_reduce, group=group)


def all_gather(x: Tensor, group: dist.ProcessGroup, *, sum_gradients: bool) -> Tensor:
    """(N, ...) of every rank -> (ranks * N, ...), in the order of the ranks.

    Args:
        sum_gradients: what the ranks compute from the result differs, so that each has a part of its gradient: the backward
            pass adds the parts up. Otherwise every rank computes the same, has the whole gradient, and takes its own rows.
    """
    if group.size() == 1:
        return x
    gathered: Tensor = _AllGather.apply(x, group, sum_gradients)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks * N, ...) of every rank -> (N, ...): this rank's rows of the sum. The backward pass gathers."""
    if group.size() == 1:
        return x
    mine: Tensor = _ReduceScatter.apply(x, group)
    return mine


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.sum_gradients = group, sum_gradients
        return _gathered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sum_gradients:
            return _scattered(grad, ctx.group), None, None
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_into(gathered, x.contiguous(), group=group)
    return gathered


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    mine = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    _reduce_scatter_into(mine, x.contiguous(), group=group)
    return mine


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ``sent[i]`` rows to rank i of ``group`` and receives ``received[i]`` from it. A collective, both ways.

    Args:
        x: (sum(sent), ...), rows for rank 0 first; the same trailing dimensions and dtype on every rank.
        sent: for each rank of the group; 0 is allowed, for all of them too.
        received: for each rank of the group, what that rank sends to this one.

    Returns:
        (sum(received), ...), rows from rank 0 first. The gradient of a row goes back to the rank it came from.
    """
    exchanged: Tensor = _AllToAllRows.apply(x, tuple(sent), tuple(received), group)
    return exchanged


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group)
    return out
