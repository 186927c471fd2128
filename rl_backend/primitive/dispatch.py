"""The way of tokens to their experts and back."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.router import Routing, count_sorted


class ExpertTokens(NamedTuple):
    """Copies of tokens, one for each expert that was chosen for them, in the order of this rank's experts.

    Attributes:
        rows: (N, hidden_size); copies for expert 0 first.
        weights: (N,) router weight of each copy.
        counts: int64, rows of each of this rank's experts; 0 for one that nobody chose.
        context: what the dispatcher needs to bring the results back.
    """

    rows: Tensor
    weights: Tensor
    counts: Tensor
    context: Any


class TokenDispatcher(Protocol):
    """Between a router and experts. No token is dropped."""

    def dispatch(self, x: Tensor, routing: Routing) -> ExpertTokens:
        """(T, hidden_size) -> the copies that this rank's experts work on."""
        ...

    def combine(self, rows: Tensor, tokens: ExpertTokens) -> Tensor:
        """(N, hidden_size), already weighted -> (T, hidden_size): the sum of each token's copies."""
        ...


class LocalDispatcher:
    """All experts are on this rank: tokens are sorted by expert. Deterministic, forward and backward.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x: Tensor, routing: Routing) -> ExpertTokens:
        order = sort_by_expert(routing.experts, self.num_experts)
        weights = routing.weights.flatten()[order.choices]
        return ExpertTokens(copy_rows(x, order.tokens, order.places), weights, order.counts, order)

    def combine(self, rows: Tensor, tokens: ExpertTokens) -> Tensor:
        order: ExpertOrder = tokens.context
        return sum_rows(rows, order.tokens, order.places)


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
    copies: Tensor = _Copy.apply(x, tokens, places)
    return copies


def sum_rows(rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """The sum of each row's copies, in the order of ``places``; (N, ...) -> (T, ...). Undoes :func:`copy_rows`."""
    summed: Tensor = _Sum.apply(rows, tokens, places)
    return summed


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_copies(grad, places), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum_copies(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad.index_select(0, tokens), None, None


def _sum_copies(rows: Tensor, places: Tensor) -> Tensor:
    copies = rows.index_select(0, places.flatten())
    return copies if places.shape[1] == 1 else copies.view(*places.shape, *rows.shape[1:]).sum(1)
