"""The experts of a mixture, all in two packed weights, and the way of tokens to them and back."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.deferred import weight_gradient
from rl_backend.primitive.router import Routing, count_sorted

_ALIGNMENT = 16
_KERNEL_CAPABILITIES = (9, 10)


class ExpertTokens(NamedTuple):
    """Copies of tokens, one for each expert that was chosen for them, in the order of this rank's experts.

    Attributes:
        rows: (N, hidden_size); copies for expert 0 first.
        weights: (N,) router weight of each copy.
        counts: int64, rows of each of this rank's experts; 0 for one that nobody chose.
        combine: (N, hidden_size), already weighted -> (T, hidden_size): the sum of each token's copies, on the rank that
            it is from.
    """

    rows: Tensor
    weights: Tensor
    counts: Tensor
    combine: Callable[[Tensor], Tensor]


type Dispatch = Callable[[Tensor, Routing], ExpertTokens]
"""(T, hidden_size) and the choices for them -> the copies that this rank's experts work on. No token is dropped."""


def dispatch_on_one_rank(x: Tensor, routing: Routing, *, num_experts: int) -> ExpertTokens:
    """All experts are on this rank: tokens are sorted by expert. Deterministic, forward and backward."""
    order = sort_by_expert(routing.experts, num_experts)
    rows, weights = copy_rows(x, order.tokens, order.places), routing.weights.flatten()[order.choices]
    return ExpertTokens(rows, weights, order.counts, partial(sum_rows, tokens=order.tokens, places=order.places))


class ExpertOrder(NamedTuple):
    """Attributes:
    choices: (N,) which of the T * top_k choices stands at each place.
    tokens: (N,) which token that is.
    places: (T, top_k) where each choice stands.
    counts: (E,) int64, choices of each expert.
    """

    choices: Tensor
    tokens: Tensor
    places: Tensor
    counts: Tensor


def sort_by_expert(experts: Tensor, num_experts: int) -> ExpertOrder:
    """The order of (T, top_k) choices by expert and, for one expert, by token."""
    ordered, choices = experts.flatten().sort(stable=True)
    places = torch.empty_like(choices)
    places[choices] = torch.arange(choices.numel(), device=choices.device)
    tokens = choices // experts.shape[1]
    return ExpertOrder(choices, tokens, places.view(experts.shape), count_sorted(ordered, num_experts))


def spread_evenly(rows: int, groups: int) -> list[int]:
    """Rows of each group, as equal as they can be: what is planned with where nothing has been counted."""
    return [rows // groups + (group < rows % groups) for group in range(groups)]


def copy_rows(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """``x[tokens]``; (T, ...) -> (N, ...). Gradients of a row's copies are summed in the order of ``places``.

    Indexing would add them up in any order on CUDA.

    Args:
        tokens: (N,) int64, which row stands at each place; every row equally often.
        places: (T, N / T) int64, where each row's copies stand.
    """
    copies: Tensor = _MoveRows.apply(x, tokens, places, True)
    return copies


def sum_rows(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """The sum of each row's copies, in the order of ``places``; (N, ...) -> (T, ...). Undoes :func:`copy_rows`."""
    summed: Tensor = _MoveRows.apply(rows, tokens, places, False)
    return summed


class _MoveRows(torch.autograd.Function):
    """Copies rows, or adds their copies up; each is the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, copy: bool) -> Tensor:
        ctx.copied = copy
        ctx.save_for_backward(places if copy else tokens)
        return x.index_select(0, tokens) if copy else _sum_copies(x, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (way_back,) = ctx.saved_tensors
        return _sum_copies(grad, way_back) if ctx.copied else grad.index_select(0, way_back), None, None, None


def _sum_copies(rows: Tensor, places: Tensor) -> Tensor:
    copies = rows.index_select(0, places.flatten())
    return copies if places.shape[1] == 1 else copies.view(*places.shape, *rows.shape[1:]).sum(1)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """``x[rows of e] @ weight[e].T`` for every group e.

    bfloat16 on CUDA devices of compute capability 9 and 10 takes torch's grouped matmul, which does not wait for the device;
    everything else copies ``counts`` to the host and takes one product for each group. The gradient of a group without rows
    is 0. That of the weight can be put off, see :mod:`rl_backend.primitive.deferred`.

    Args:
        x: (N, in_features), rows of group 0 first.
        weight: (E, out_features, in_features), of the dtype of ``x``.
        counts: (E,) int64, rows of each group; N in all.

    Returns:
        (N, out_features)
    """
    function = _GroupedMatmul if _has_kernel(x, weight) else _GroupByGroup
    product: Tensor = function.apply(x, weight, counts)
    return product


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped matmul runs as one kernel: rows must be aligned; other devices go group by group."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != x.dtype:
        return False
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(x.device)[0] in _KERNEL_CAPABILITIES


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
        # The meta device has no counts.
        ctx.counts = spread_evenly(x.shape[0], weight.shape[0]) if counts.is_meta else counts.tolist()
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


class SwiGLUExperts(nn.Module):
    """E gated feed-forward blocks, ``down(silu(gate(x)) * up(x))``, on the tokens that a router gave them.

    Attributes:
        gate_up_proj: (E, 2, intermediate_size, hidden_size): ``[e, 0]`` is the gate of expert e, ``[e, 1]`` its
            up-projection. Experts and intermediate features are dimensions of their own, so that each can be sharded.
        down_proj: (E, hidden_size, intermediate_size).
        dispatch: brings tokens to the experts; replace it where they are on several ranks.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))
        self.dispatch: Dispatch = partial(dispatch_on_one_rank, num_experts=num_experts)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(T, hidden_size) -> (T, hidden_size): the weighted sum of what each token's experts return."""
        tokens = self.dispatch(x, routing)
        gate_up = grouped_linear(tokens.rows, self.gate_up_proj.flatten(1, 2), tokens.counts)
        # The down-projection is linear: weighting what goes in costs less than weighting what comes out.
        hidden: Tensor = _WeightedSwiGLU.apply(gate_up, tokens.weights)
        return tokens.combine(grouped_linear(hidden, self.down_proj, tokens.counts))

    def extra_repr(self) -> str:
        experts, _, intermediate_size, hidden_size = self.gate_up_proj.shape
        return f"{experts} experts, hidden_size={hidden_size}, intermediate_size={intermediate_size}"


class _WeightedSwiGLU(torch.autograd.Function):
    """``silu(gate) * up * weight``; (N, 2 * size) and (N,) -> (N, size). Keeps its inputs alone, computes in float32."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(weights[:, None]).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        grad = grad.to(weights.dtype)
        activated = F.silu(gate)
        grad_gate_up = torch.empty(gate_up.shape, dtype=weights.dtype, device=gate_up.device)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        grad_weights = (grad_up * up).sum(-1)
        grad_up.mul_(weights[:, None])
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate)).mul_(weights[:, None])
        return grad_gate_up.to(gate_up.dtype), grad_weights
