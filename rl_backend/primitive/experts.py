"""Experts of a mixture, with adapters beside them, and the way of tokens to them and back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_backend.primitive.activation import sigmoid
from rl_backend.primitive.adapters import AdapterRun, Columns, Factors, Work, runs_at_work
from rl_backend.primitive.grouped_linear import grouped_linear, grouped_product
from rl_backend.primitive.router import Routing, count_sorted


class RowOwners(NamedTuple):
    """Whose the rows are that a layer with experts sees."""

    of_rows: Tensor  # (T,) int64, place in the others; their length for rows of nobody who adapts experts
    keys: Sequence[int]  # the number of each adapter of experts in the pass
    modules: Sequence[Mapping[str, Factors]]  # what each has
    draws: Sequence[int]  # of each, -1 without dropout

    @property
    def kinds(self) -> int:
        return len(self.keys) + 1

    def runs(self, counts: Sequence[Sequence[int]], draws: Sequence[Sequence[int]]) -> list[tuple[int, AdapterRun]]:
        """(expert, adapter at work on its rows), of rows sorted by expert, owner and sender; ``counts`` are by sender."""
        found, start = list[tuple[int, AdapterRun]](), 0
        for place, total in enumerate(map(sum, zip(*counts, strict=True))):
            expert, owner = divmod(place, self.kinds)
            if total and owner < len(self.keys):
                # Tensor-parallel ranks have one draw: which of them sends a row depends on what is beside it.
                blocks: dict[int, int] = {}
                for sent, drawn in zip(counts, draws, strict=True):
                    blocks[drawn[owner]] = blocks.get(drawn[owner], 0) + sent[place]
                first = start
                for draw, rows in blocks.items():
                    run = AdapterRun(first, first + rows, self.modules[owner], None if draw < 0 else draw)
                    found += [(expert, run)] if rows else []
                    first += rows
            start += total
        return found


class TokenShare(NamedTuple):
    """Which of the tokens of a micro-batch a layer with experts sees, where tensor-parallel ranks share them out."""

    rank: int = 0  # of the ranks, in the order of their tokens
    copy: int = 0  # of the experts, the one that this rank's tokens go to
    copies: int = 1  # of the experts


def row_owners(num_rows: int, share: TokenShare, device: torch.device) -> RowOwners | None:
    """Of this rank's rows among those of the runs at work; None where no adapter in the pass is one of experts."""
    runs = runs_at_work()
    of_experts = runs[0].of_experts if runs else {}
    if not of_experts:
        return None
    keys, first = sorted(of_experts), share.rank * num_rows
    of_rows, draws = torch.full((num_rows,), len(keys), device=device), [-1] * len(keys)
    for run in runs:
        if run.key in of_experts:
            owner = keys.index(run.key)
            of_rows[max(run.start - first, 0) : max(run.stop - first, 0)] = owner
            draws[owner] = -1 if run.draw is None else run.draw * share.copies + share.copy
    return RowOwners(of_rows, keys, [of_experts[key] for key in keys], draws)


def adapted_experts(
    x: Tensor, weight: Tensor, counts: Tensor, names: Sequence[Sequence[str]], adapters: Sequence[tuple[int, AdapterRun]]
) -> Tensor:
    """As :func:`~rl_backend.primitive.grouped_linear.grouped_linear` with a frozen weight, plus what adapters add to rows.

    Args:
        x: (N, in_features).
        weight: (E, projections, out_features, in_features).
        counts: (E,) int64, rows of each expert.
        names: for each expert, of its projections, in ``AdapterRun.modules``.
        adapters: (expert, adapter at work on some of its rows).

    Returns:
        (N, projections * out_features)
    """
    product: Tensor = _AdaptedExperts.apply(x, weight, counts, names, adapters)
    return product


class _AdaptedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        names: Sequence[Sequence[str]],
        adapters: Sequence[tuple[int, AdapterRun]],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        layers, width = weight.flatten(1, 2), weight.shape[2]
        y = grouped_product(x, layers.transpose(1, 2), counts)
        ctx.work = [
            (expert, Work([run], [run.modules[name]], Columns(1, place * width, (place + 1) * width), layers[expert]))
            for expert, run in adapters
            for place, name in enumerate(names[expert])
            if name in run.modules
        ]
        for expert, work in ctx.work:
            work.add_to(y, x, layers[expert])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight, counts = ctx.saved_tensors
        layers = weight.flatten(1, 2)
        grad_x = grouped_product(grad, layers, counts)
        for expert, work in ctx.work:
            work.add_gradients(grad_x, x, grad, layers[expert])
        return grad_x, None, None, None, None


class ExpertTokens(NamedTuple):
    """Copies of tokens, one for each expert that was chosen for them, in the order of this rank's experts."""

    rows: Tensor  # (N, hidden_size); copies for expert 0 first
    weights: Tensor  # (N,) router weight of each copy
    counts: Tensor  # int64, rows of each of this rank's experts
    combine: Callable[[Tensor], Tensor]  # weighted (N, hidden_size) -> (T, hidden_size) on the rank of each token
    adapters: Sequence[tuple[int, AdapterRun]] = ()  # (one of this rank's experts, adapter at work on some of its rows)


type Dispatch = Callable[[Tensor, Routing, RowOwners | None], ExpertTokens]
"""(T, hidden_size), the choices for them and whose they are -> the copies that this rank's experts work on. No token is
dropped."""


def dispatch_on_one_rank(x: Tensor, routing: Routing, owners: RowOwners | None = None, *, num_experts: int) -> ExpertTokens:
    """All experts are on this rank: tokens are sorted by expert. Deterministic, forward and backward."""
    order = sort_by_expert(*with_owners(routing.experts, num_experts, owners))
    rows, weights = copy_rows(x, order.tokens, order.places), routing.weights.flatten()[order.choices]
    combine = partial(sum_rows, tokens=order.tokens, places=order.places)
    if owners is None:
        return ExpertTokens(rows, weights, order.counts, combine)
    runs = owners.runs([order.counts.tolist()], [owners.draws])
    return ExpertTokens(rows, weights, order.counts.view(-1, owners.kinds).sum(1), combine, runs)


def with_owners(experts: Tensor, num_experts: int, owners: RowOwners | None) -> tuple[Tensor, int]:
    """(T, top_k) choices -> numbers by which to sort them by expert and then by owner, and how many of these there are."""
    if owners is None:
        return experts, num_experts
    return experts * owners.kinds + owners.of_rows[:, None], num_experts * owners.kinds


class ExpertOrder(NamedTuple):
    choices: Tensor  # (N,) which of the T * top_k choices stands at each place
    tokens: Tensor  # (N,) which token that is
    places: Tensor  # (T, top_k) where each choice stands
    counts: Tensor  # (E,) int64, choices of each expert


def sort_by_expert(experts: Tensor, num_experts: int) -> ExpertOrder:
    """The order of (T, top_k) choices by expert and, for one expert, by token."""
    ordered, choices = experts.flatten().sort(stable=True)
    places = torch.empty_like(choices)
    places[choices] = torch.arange(choices.numel(), device=choices.device)
    tokens = choices // experts.shape[1]
    return ExpertOrder(choices, tokens, places.view(experts.shape), count_sorted(ordered, num_experts))


def copy_rows(x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """``x[tokens]``; (T, ...) -> (N, ...), every row equally often; ``places``, (T, N / T), say where each row's copies
    stand.
    """
    # Indexing would add gradients of copies up in any order on CUDA; here it is that of ``places``.
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


class Experts(nn.Module, ABC):
    """E feed-forward blocks on the tokens that a router gave them.

    ``intermediate_dims`` is, of a parameter, its dimension of intermediate features, which ranks may share out; None for
    one that is added to what an expert returns. Replace ``dispatch`` where experts are on several ranks.
    """

    intermediate_dims: ClassVar[Mapping[str, int | None]]

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.dispatch: Dispatch = partial(dispatch_on_one_rank, num_experts=num_experts)
        self.first_expert = 0
        self.share = TokenShare()

    @abstractmethod
    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """(T, hidden_size) -> (T, hidden_size): the weighted sum of what each token's experts return."""


class SwiGLUExperts(Experts):
    """Gated blocks, ``down(silu(gate(x)) * up(x))``.

    ``gate_up_proj`` is (E, 2, intermediate_size, hidden_size), gates before ups, so that features can be sharded;
    ``down_proj`` is (E, hidden_size, intermediate_size). ``names`` are, for each expert of all ranks, Hugging Face names
    of gate, up and down, where adapters may work beside the frozen experts; else None.
    """

    intermediate_dims: ClassVar[Mapping[str, int | None]] = {"gate_up_proj": 2, "down_proj": 2}

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(num_experts)
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, 2, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))
        self.names: Sequence[Sequence[str]] | None = None

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        if self.names is not None:
            return self._adapted(x, routing, self.names[self.first_expert :])
        tokens = self.dispatch(x, routing, None)
        gate_up = grouped_linear(tokens.rows, self.gate_up_proj.flatten(1, 2), tokens.counts)
        # The down-projection is linear: weighting what goes in costs less than weighting what comes out.
        hidden: Tensor = _WeightedSwiGLU.apply(gate_up, tokens.weights)
        return tokens.combine(grouped_linear(hidden, self.down_proj, tokens.counts))

    def _adapted(self, x: Tensor, routing: Routing, names: Sequence[Sequence[str]]) -> Tensor:
        rows, weights, counts, combine, runs = self.dispatch(x, routing, row_owners(x.shape[0], self.share, x.device))
        gate_up = adapted_experts(rows, self.gate_up_proj, counts, [each[:2] for each in names], runs)
        hidden: Tensor = _WeightedSwiGLU.apply(gate_up, weights)
        return combine(adapted_experts(hidden, self.down_proj[:, None], counts, [each[2:] for each in names], runs))

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


LIMIT = 7.0
"""Of gates, from above, and of what they gate, from both sides."""
_SHARPNESS = 1.702
"""Of the sigmoid, with which ``x * sigmoid(1.702 x)`` is near GELU."""


class ClampedExperts(Experts):
    """``down((up + 1) * gate * sigmoid(1.702 * gate))`` of clamped gates and ups, with biases, as in gpt-oss (arXiv
    2508.10925).

    Matrices lie as in Hugging Face directories: inputs before outputs, gates and ups in turn. With ``beside_adapters`` a
    row has the same bits whatever rows are beside it, as passes of tenants need; the experts are frozen then.
    """

    intermediate_dims: ClassVar[Mapping[str, int | None]] = {
        # A part of pairs of gates and ups has both of each.
        "gate_up_proj": 2,
        "gate_up_proj_bias": 1,
        "down_proj": 1,
        "down_proj_bias": None,
    }

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(num_experts)
        self.gate_up_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, 2 * intermediate_size))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, 2 * intermediate_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, intermediate_size, hidden_size))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.beside_adapters = False

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        tokens = self.dispatch(x, routing, None)
        product: Callable[[Tensor, Tensor, Tensor], Tensor] = _frozen_product if self.beside_adapters else grouped_linear
        # Which of this rank's experts each row is for.
        numbers = torch.arange(len(tokens.counts), device=x.device)
        experts = torch.repeat_interleave(numbers, tokens.counts, output_size=len(tokens.rows))
        gate_up = product(tokens.rows, self.gate_up_proj.transpose(1, 2), tokens.counts)
        hidden: Tensor = _Gated.apply(gate_up, self.gate_up_proj_bias, experts, tokens.weights)
        output = product(hidden, self.down_proj.transpose(1, 2), tokens.counts)
        added: Tensor = _WithBias.apply(output, self.down_proj_bias, experts, tokens.weights)
        return tokens.combine(added)

    def extra_repr(self) -> str:
        experts, intermediate_size, hidden_size = self.down_proj.shape
        return f"{experts} experts, hidden_size={hidden_size}, intermediate_size={intermediate_size}"


def _frozen_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return adapted_experts(x, weight[:, None], counts, (), ())


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, bias, experts, weights)
        gate, up = _with_bias(gate_up, bias, experts, weights.dtype)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (gate * sigmoid(_SHARPNESS * gate)).mul_(up.add_(1.0)).mul_(weights[:, None]).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        gate_up, bias, experts, weights = ctx.saved_tensors
        whole_gate, whole_up = _with_bias(gate_up, bias, experts, weights.dtype)
        gate, factor = whole_gate.clamp(max=LIMIT), whole_up.clamp(-LIMIT, LIMIT).add_(1.0)
        shares = sigmoid(_SHARPNESS * gate)
        activated, grad = gate * shares, grad.to(weights.dtype)
        grad_weights = (grad * activated * factor).sum(-1)
        grad = grad * weights[:, None]
        of_gate = (shares + _SHARPNESS * activated * (1.0 - shares)).mul_(factor).mul_(grad)
        of_up = activated.mul_(grad)
        grad_gate_up = torch.empty(gate_up.shape, dtype=weights.dtype, device=gate_up.device)
        # A value at the limit still has a gradient, as clamp gives it.
        grad_gate_up[:, 0::2] = of_gate.mul_(whole_gate <= LIMIT)
        grad_gate_up[:, 1::2] = of_up.mul_(whole_up.abs() <= LIMIT)
        of_bias = _sum_by_expert(grad_gate_up, experts, bias) if ctx.needs_input_grad[1] else None
        return grad_gate_up.to(gate_up.dtype), of_bias, None, grad_weights


class _WithBias(torch.autograd.Function):
    """Rows plus the biases of their experts, times their weights; computes in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(bias, experts, weights)
        return rows + (bias.to(weights.dtype)[experts] * weights[:, None]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor]:
        bias, experts, weights = ctx.saved_tensors
        wide = grad.to(weights.dtype)
        of_bias = _sum_by_expert(wide * weights[:, None], experts, bias) if ctx.needs_input_grad[1] else None
        return grad, of_bias, None, (wide * bias.to(weights.dtype)[experts]).sum(-1)


def _with_bias(gate_up: Tensor, bias: Tensor, experts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    whole = gate_up.to(dtype) + bias.to(dtype)[experts]
    return whole[:, 0::2], whole[:, 1::2]


def _sum_by_expert(rows: Tensor, experts: Tensor, bias: Tensor) -> Tensor:
    # A product: adding rows up one by one takes any order on CUDA.
    members = experts == torch.arange(len(bias), device=rows.device)[:, None]
    return (members.to(rows.dtype) @ rows).to(bias.dtype)
