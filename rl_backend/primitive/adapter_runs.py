"""Adapters at work on rows of a micro-batch, and what one rank has of each."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

type SumOverRanks = Callable[[Tensor], object]
"""Adds a tensor up over ranks, in place."""


class Factors(NamedTuple):
    """What one rank has of an adapter's factors for one module, and where their gradients are added up.

    Attributes:
        a, grad_a: (rank, in_features).
        b, grad_b: (out_features, rank).
        scale: of their product.
        dropout: share of the inputs that is dropped.
        seed: of the module, for dropout.
        magnitude, grad_magnitude: (out_features,), with DoRA.
        sum_over_inputs: over the ranks that have the other inputs of the module; None where this one has all.
    """

    a: Tensor
    b: Tensor
    grad_a: Tensor
    grad_b: Tensor
    scale: float
    dropout: float
    seed: int
    magnitude: Tensor | None = None
    grad_magnitude: Tensor | None = None
    sum_over_inputs: SumOverRanks | None = None


class Columns(NamedTuple):
    """Where the outputs of one module are in a layer that fuses several: between ``start`` and ``stop`` of each of
    ``groups`` equal parts.
    """

    groups: int
    start: int
    stop: int

    def of(self, y: Tensor) -> Tensor:
        """(T, outputs of the layer) -> (T, groups, stop - start), a view."""
        return y.view(y.shape[0], self.groups, -1)[..., self.start : self.stop]


class OwnHead(NamedTuple):
    """A value head that a tenant trains whole, and where its gradients are added up.

    Attributes:
        weight, grad_weight: (1, hidden_size) float32.
        bias, grad_bias: (1,) float32.
    """

    weight: Tensor
    bias: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


@dataclass(frozen=True, eq=False)
class AdapterRun:
    """Rows ``start`` to ``stop`` of the tokens that a layer sees belong to one adapter.

    Attributes:
        modules: name of a module -> its factors; a module that is not there has no adapter.
        draw: which part of the tenant's data these rows are, for dropout; None without dropout.
        head: gives their values, in place of the model's own head; None where that is the tenant's.
        key: the adapter's number, the same on all ranks.
        of_experts: key -> modules, of all adapters of experts in the pass, the same keys on all ranks: tokens of any of them
            may come to this rank's experts.
    """

    start: int
    stop: int
    modules: Mapping[str, Factors]
    draw: int | None = None
    head: OwnHead | None = None
    key: int = -1
    of_experts: Mapping[int, Mapping[str, Factors]] = field(default_factory=dict)


@dataclass
class _Active:
    """The runs of the layer that computes now. Autograd recomputes layers in threads of its own, one at a time."""

    runs: Sequence[AdapterRun] = ()


_active = _Active()


def runs_at_work() -> Sequence[AdapterRun]:
    """Those of the innermost :func:`adapters_at_work`."""
    return _active.runs


@contextmanager
def adapters_at_work(runs: Sequence[AdapterRun]) -> Generator[None]:
    """Layers called in this context apply these adapters. Entered inside each layer's forward, for recomputation."""
    before = _active.runs
    _active.runs = runs
    try:
        yield
    finally:
        _active.runs = before


def runs_of_share(runs: Sequence[AdapterRun], num_rows: int, rank: int, ranks: int) -> list[AdapterRun]:
    """The runs on the rows of one of ``ranks`` that have ``num_rows`` each, counted from its first; draws are its own."""
    first, found = rank * num_rows, []
    for run in runs:
        start, stop = max(run.start - first, 0), min(run.stop - first, num_rows)
        if start < stop:
            draw = None if run.draw is None else run.draw * ranks + rank
            found.append(replace(run, start=start, stop=stop, draw=draw))
    return found


def split_by_adapter(runs: Sequence[AdapterRun], num_rows: int) -> Iterator[tuple[slice, AdapterRun | None]]:
    """The rows of each run and between runs, ``num_rows`` together."""
    of_start = {run.start: run for run in runs if run.stop > run.start}
    edges = sorted({0, num_rows, *(edge for run in runs for edge in (run.start, run.stop))})
    for start, stop in itertools.pairwise(edges):
        yield slice(start, stop), of_start.get(start)


def dropped(x: Tensor, draw: int | None, factors: Factors) -> Tensor:
    """``x`` with some elements dropped, the same ones each time it is called for one draw and module."""
    if draw is None or not factors.dropout:
        return x
    generator = torch.Generator(x.device).manual_seed((factors.seed * 1_000_003 + draw) % 2**63)
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= factors.dropout
    return x * kept / (1.0 - factors.dropout)
