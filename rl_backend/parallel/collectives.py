"""Differentiable collectives over the first dimension."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.autograd.function import once_differentiable

# torch knows a group by its name until it is destroyed.
_group_named: Callable[[Any], dist.ProcessGroup] = _distributed_c10d._resolve_process_group

# torch 2.13 has new names for these two and warns of the old ones.
all_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""(output, input, group=): the inputs of all ranks one after the other, without a backward pass."""
_reduce_scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_over(group: dist.ProcessGroup) -> Callable[[Tensor], object]:
    """Adds a small tensor up over the ranks of ``group``, in place, without a backward pass. A collective."""
    return partial(_sum_in_place, group=group)


def _sum_in_place(x: Tensor, group: dist.ProcessGroup) -> None:
    if _order_varies(x, group):
        x.copy_(_sum_of_rows(_gathered(x.reshape(1, -1), group)).view_as(x))
    else:
        dist.all_reduce(x, group=group)


def gather_objects[T](mine: T, group: dist.ProcessGroup) -> list[T]:
    """``mine`` of every rank, in their order, pickled on the way. A collective over ``group``."""
    found = [mine] * group.size()
    if len(found) > 1:
        dist.all_gather_object(found, mine, group=group)
    return found


def all_gather(x: Tensor, group: dist.ProcessGroup, *, sum_gradients: bool) -> Tensor:
    """(N, ...) of every rank -> (ranks * N, ...), in the order of the ranks. ``sum_gradients``: what the ranks compute from
    the result differs, so that each has a part of its gradient: the backward pass adds the parts up. Otherwise every rank
    computes the same, has the whole gradient, and takes its own rows.
    """
    if group.size() == 1:
        return x
    backward = partial(_scattered if sum_gradients else _own_rows, group=group)
    gathered: Tensor = _Collective.apply(x, partial(_gathered, group=group), backward)
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(ranks * N, ...) of every rank -> (N, ...): this rank's rows of the sum. The backward pass gathers."""
    if group.size() == 1:
        return x
    mine: Tensor = _Collective.apply(x, partial(_scattered, group=group), partial(_gathered, group=group))
    return mine


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, on every rank. Each computes something else from it: the backward pass adds gradients up."""
    summed: Tensor = _Collective.apply(x, partial(_summed, group=group), partial(_summed, group=group))
    return summed


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(grad), None, None


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    all_gather_into(gathered, x.contiguous(), group=group)
    return gathered


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if _order_varies(x, group):
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(parts, x.contiguous(), group=group)
        return _sum_of_rows(parts.view(group.size(), x.shape[0] // group.size(), *x.shape[1:])).clone()
    mine = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    _reduce_scatter_into(mine, x.contiguous(), group=group)
    return mine


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _sum_in_place(total, group)
    return total


def _order_varies(x: Tensor, group: dist.ProcessGroup) -> bool:
    # gloo adds up the ranks' numbers in an order that depends on where in ``x`` they are, and so on how many rows there are.
    # It is made that of the ranks: LoRA tenants beside each other must compute what each of them computes alone.
    return group.size() > 2 and x.device.type == "cpu"


def _sum_of_rows(parts: Tensor) -> Tensor:
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


def _own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Sends ``sent[i]`` rows to rank i of ``group`` and receives ``received[i]`` from it. A collective, both ways.

    (sum(sent), ...), rows for rank 0 first -> (sum(received), ...), rows from rank 0 first; the same trailing dimensions
    and dtype on every rank. Numbers of rows may be 0. The gradient of a row goes back to the rank it came from.
    """
    forward = partial(_exchange, sent=list(sent), received=list(received), group=group)
    backward = partial(_exchange, sent=list(received), received=list(sent), group=group)
    exchanged: Tensor = _Collective.apply(x, forward, backward)
    return exchanged


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class RankOperators:
    """The collectives over one group as an operator, which compiled code holds; it does not hold groups or functions."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name

    def all_gather(self, x: Tensor, *, sum_gradients: bool) -> Tensor:
        """:func:`all_gather`, in compiled code too."""
        if not torch.compiler.is_compiling():
            return all_gather(x, self.group, sum_gradients=sum_gradients)
        return self._over_ranks(x, "gather" if sum_gradients else "gather same")

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._over_ranks(x, "scatter") if torch.compiler.is_compiling() else reduce_scatter(x, self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._over_ranks(x, "sum") if torch.compiler.is_compiling() else all_reduce(x, self.group)

    def _over_ranks(self, x: Tensor, how: str) -> Tensor:
        done: Tensor = torch.ops.rl_backend.over_ranks(x, how, self.name)
        return done


_FORMS: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "gather": _gathered,
    "gather same": _gathered,
    "scatter": _scattered,
    "sum": _summed,
    "own": lambda x, group: _own_rows(x, group).clone(memory_format=torch.contiguous_format),
}
_BACKWARD = {"gather": "scatter", "gather same": "own", "scatter": "gather", "sum": "sum"}


@torch.library.custom_op("rl_backend::over_ranks", mutates_args=(), schema="(Tensor x, str how, str group) -> Tensor")
def _over_ranks(x: Tensor, how: str, group: str) -> Tensor:
    return _FORMS[how](x, _group_named(group))


@_over_ranks.register_fake
def _(x: Tensor, how: str, group: str) -> Tensor:
    size, rows = _group_named(group).size(), x.shape[0]
    of_all = {"gather": rows * size, "gather same": rows * size, "sum": rows}
    return x.new_empty(of_all.get(how, rows // size), *x.shape[1:])


def _remember(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    _, how, ctx.group_name = inputs
    ctx.of_gradient = _BACKWARD[how]


def _of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.rl_backend.over_ranks(grad, ctx.of_gradient, ctx.group_name), None, None


_over_ranks.register_autograd(_of_gradient, setup_context=_remember)
