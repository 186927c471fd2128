"""Experts of a frozen mixture with low-rank products of several adapters beside them, and the owners of rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.adapted_layers import Work
from rl_backend.primitive.adapter_runs import AdapterRun, Columns, Factors, runs_at_work
from rl_backend.primitive.grouped_linear import grouped_product


class RowOwners(NamedTuple):
    """Whose the rows are that a layer with experts sees.

    Attributes:
        of_rows: (T,) int64, place in the others; their length for rows of nobody who adapts experts.
        keys, modules, draws: of each adapter of experts in the pass; the draw is -1 without dropout.
    """

    of_rows: Tensor
    keys: Sequence[int]
    modules: Sequence[Mapping[str, Factors]]
    draws: Sequence[int]

    @property
    def kinds(self) -> int:
        """Different numbers in ``of_rows``."""
        return len(self.keys) + 1

    def runs(self, counts: Sequence[Sequence[int]], draws: Sequence[Sequence[int]]) -> list[tuple[int, AdapterRun]]:
        """(expert, adapter at work on its rows), of rows that are sorted by expert, owner and sender.

        Args:
            counts: for each sender, rows of each expert and owner, the owner fastest.
            draws: for each sender, of each adapter.
        """
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
    """Which of the tokens of a micro-batch a layer with experts sees, where tensor-parallel ranks share them out.

    Attributes:
        rank: of the ranks, in the order of their tokens.
        copy, copies: which copy of the experts this rank's tokens go to.
    """

    rank: int = 0
    copy: int = 0
    copies: int = 1


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
        names: for each expert, of its projections, in :attr:`~rl_backend.primitive.adapter_runs.AdapterRun.modules`.
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
