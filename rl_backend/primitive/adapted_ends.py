"""Embeddings and heads of a frozen model, with low-rank products of several adapters beside them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.adapter_runs import AdapterRun, Factors, dropped, runs_at_work, split_by_adapter

HEAD = "lm_head"
"""Hugging Face name of the module of the vocabulary projection."""


def parts_of_head(adapters: Sequence[AdapterRun], num_rows: int) -> Iterator[tuple[slice, AdapterRun | None]]:
    """Rows that are computed together, and the adapter of the head that works on them."""
    start = 0
    for rows, run in split_by_adapter(adapters, num_rows):
        if run is not None and HEAD in run.modules:
            if start < rows.start:
                yield slice(start, rows.start), None
            yield rows, run
            start = rows.stop
    if start < num_rows or not num_rows:
        yield slice(start, num_rows), None


class Narrowed(torch.autograd.Function):
    """``scale * dropout(x) @ a.T`` of one adapter's rows; the gradient of ``a`` goes to its buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, draw: int | None, factors: Factors) -> Tensor:
        ctx.save_for_backward(x)
        ctx.draw, ctx.factors = draw, factors
        return _narrow(dropped(x, draw, factors), factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        factors, scaled = ctx.factors, grad * ctx.factors.scale
        _add_product(factors.grad_a, scaled.t(), dropped(x, ctx.draw, factors))
        return dropped(scaled @ factors.a.to(grad.dtype), ctx.draw, factors), None, None


def adapted_embedding(tokens: Tensor, weight: Tensor, name: str) -> Tensor:
    """Rows of ``weight``, plus ``scale * b @ a[:, token]`` for the tokens of each adapter that has ``name``.

    Args:
        tokens: (T,) int64.
        weight: (vocab_size, hidden_size), frozen.
    """
    work = [(run, run.modules[name]) for run in runs_at_work() if name in run.modules]
    if not work:
        return F.embedding(tokens, weight)
    # Tokens have no gradient; something has to ask for those of the factors.
    anchor = weight.new_zeros((), requires_grad=torch.is_grad_enabled())
    looked_up: Tensor = _AdaptedEmbedding.apply(anchor, tokens, weight, work)
    return looked_up


class _AdaptedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tokens: Tensor, weight: Tensor, work: Sequence[tuple[AdapterRun, Factors]]
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.work = work
        hidden = F.embedding(tokens, weight)
        for run, factors in work:
            rows = slice(run.start, run.stop)
            hidden[rows] += _looked_up(tokens[rows], factors).to(hidden.dtype) @ factors.b.to(hidden.dtype).t()
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (tokens,) = ctx.saved_tensors
        for run, factors in ctx.work:
            own, grad_own = tokens[run.start : run.stop], grad[run.start : run.stop]
            _add_product(factors.grad_b, grad_own.t(), _looked_up(own, factors).to(grad.dtype))
            grad_narrow = (grad_own @ factors.b.to(grad.dtype)).mul_(factors.scale)
            factors.grad_a.index_add_(1, own, grad_narrow.to(factors.grad_a.dtype).t())
        return None, None, None, None


def _looked_up(tokens: Tensor, factors: Factors) -> Tensor:
    """(rows,) -> (rows, rank)"""
    return factors.a.t()[tokens].mul_(factors.scale)


def _narrow(x: Tensor, factors: Factors) -> Tensor:
    """``scale * x @ a.T``: (rows, in_features) -> (rows, rank)"""
    return (x @ factors.a.to(x.dtype).t()).mul_(factors.scale)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``out += a @ b``, in the dtype of the factors."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)
