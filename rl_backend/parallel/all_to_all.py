"""Exchanging rows between the ranks of a group, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


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
