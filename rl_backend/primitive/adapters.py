"""Low-rank products of several adapters beside the frozen layers of a model."""

import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

type SumOverRanks = Callable[[Tensor], object]
"""Adds a tensor up over ranks, in place."""


class Factors(NamedTuple):
    """What one rank has of an adapter's factors for one module, and where their gradients are added up."""

    a: Tensor  # (rank, in_features)
    b: Tensor  # (out_features, rank)
    grad_a: Tensor
    grad_b: Tensor
    scale: float  # of their product
    dropout: float  # share of the inputs that is dropped
    seed: int  # of the module, for dropout
    magnitude: Tensor | None = None  # (out_features,), with DoRA
    grad_magnitude: Tensor | None = None
    sum_over_inputs: SumOverRanks | None = None  # None where this rank has all inputs of the module


class Columns(NamedTuple):
    """Where the outputs of one module are in a layer that fuses several: in each of ``groups`` equal parts."""

    groups: int
    start: int
    stop: int

    def of(self, y: Tensor) -> Tensor:
        """(T, outputs of the layer) -> (T, groups, stop - start), a view."""
        return y.view(y.shape[0], self.groups, -1)[..., self.start : self.stop]


class OwnHead(NamedTuple):
    """A value head that a tenant trains whole, and where its gradients are added up."""

    weight: Tensor  # (1, hidden_size) float32
    bias: Tensor  # (1,) float32
    grad_weight: Tensor  # (1, hidden_size) float32
    grad_bias: Tensor  # (1,) float32


@dataclass(frozen=True, eq=False)
class AdapterRun:
    """Rows ``start`` to ``stop`` of the tokens that a layer sees belong to one adapter."""

    start: int
    stop: int
    modules: Mapping[str, Factors]  # a module that is not there has no adapter
    draw: int | None = None  # which part of the tenant's data these rows are, for dropout
    head: OwnHead | None = None  # in place of the model's own head
    key: int = -1  # the adapter's number, the same on all ranks
    of_experts: Mapping[int, Mapping[str, Factors]] = field(default_factory=dict)  # key -> modules, of all in the pass


@dataclass
class _Active:
    runs: Sequence[AdapterRun] = ()


_active = _Active()


def runs_at_work() -> Sequence[AdapterRun]:
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


ENOUGH_ROWS = 16
"""From so many rows on, products of float32 matrices take one path in the libraries tried, with one thread or several."""
ENOUGH_COLUMNS = 16
"""A product with fewer may take that of products with vectors, in which rows depend on how many there are."""


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, modules: Mapping[str, Columns | None]) -> Tensor:
    """``x @ weight.T + bias`` of all rows, plus ``scale * x @ a.T @ b.T`` of the rows of each adapter that has a module.

    ``modules`` are names in :attr:`AdapterRun.modules` -> their outputs. Adapters get gradients only if ``x`` requires one.
    """
    adapted: Tensor = _AdaptedLinear.apply(x, weight, bias, modules, runs_at_work())
    return adapted


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        modules: Mapping[str, Columns | None],
        runs: Sequence[AdapterRun],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = padded_product(x, weight.t())
        ctx.work = [
            Work(stack, [run.modules[name] for run in stack], columns, weight)
            for name, columns in modules.items()
            for stack in stacks_of(runs, name)
        ]
        for work in ctx.work:
            work.add_to(y, x, weight)
        if bias is not None:
            y += bias
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x = padded_product(grad, weight)
        for work in ctx.work:
            work.add_gradients(grad_x, x, grad, weight)
        return grad_x, None, None, None, None


def stacks_of(runs: Sequence[AdapterRun], name: str) -> list[list[AdapterRun]]:
    """The runs that have the module ``name``, in as few stacks as their order allows."""
    found: list[list[AdapterRun]] = []
    for run in runs:
        if name in run.modules:
            # Each of a stack's products is one product of stacks, with the bits of single ones.
            if found and _are_alike(found[-1], run, name):
                found[-1].append(run)
            else:
                found.append([run])
    return found


def _are_alike(stack: Sequence[AdapterRun], run: AdapterRun, name: str) -> bool:
    first, factors = stack[0], run.modules[name]
    return (
        stack[-1].stop == run.start
        and first.stop - first.start == run.stop - run.start >= ENOUGH_ROWS
        and first.modules[name].a.shape == factors.a.shape
        and all(each.magnitude is None and not each.dropout for each in (first.modules[name], factors))
        # Gradients of one adapter in two places must not meet in one addition.
        and all(each.modules[name] is not factors for each in stack)
    )


class Work:
    """One module of neighbouring adapters at work, each on rows of its own, beside a frozen layer.

    DoRA's product is ``(magnitude / norm) * (W x + scale * B A x)``, ``norm`` being those of the rows of ``W + scale * B
    A`` and a constant in the backward pass (Liu et al., arXiv 2402.09353, section 4.3).

    Args:
        runs: a stack of :func:`stacks_of`.
        factors: of the module, of each.
        columns: of the module among the outputs of the layer.
        weight: of the layer, (outputs, in_features). With DoRA a collective where its inputs are cut.
    """

    def __init__(
        self, runs: Sequence[AdapterRun], factors: Sequence[Factors], columns: Columns | None, weight: Tensor
    ) -> None:
        self._rows, self._draw = slice(runs[0].start, runs[-1].stop), runs[0].draw
        self._factors, self._first = factors, factors[0]
        self._columns = columns
        self._norm = None
        if self._first.magnitude is not None:
            self._norm = _norms_of_rows(self._of_module(weight.t()).t(), self._first)

    def add_to(self, y: Tensor, x: Tensor, weight: Tensor) -> None:
        """Adds to ``y``, (T, outputs), the layer's frozen product without a bias, what the adapters make of ``x``."""
        own, x, first = y[self._rows], x[self._rows], self._first
        kept = dropped(x, self._draw, first)
        # For the gradients as well.
        self._a, self._b = self._stack("a", x.dtype), _with_enough_columns(self._stack("b", x.dtype).mT).mT
        self._scales = self._scale()
        self._low = torch.bmm(self._by_adapter(kept), self._a.mT).mul_(self._scales)
        if self._columns is None and self._norm is None and self._b.shape[1] == own.shape[1]:
            # Memory of the outputs is passed over once.
            self._by_adapter(own).baddbmm_(self._low, self._b.mT)
            return
        change = torch.bmm(self._low, self._b.mT).flatten(0, 1)[:, : first.b.shape[0]]
        if first.magnitude is not None and self._norm is not None:
            # ``x`` is dropped out in what is added to ``W x``, as peft does it.
            base = self._of_module(own) if kept is x else padded_product(kept, self._of_module(weight.t()))
            gain = (first.magnitude / self._norm).to(x.dtype)
            change = base * (gain - 1) + change * gain
        if self._columns is None:
            own += change
        else:
            view = self._columns.of(own)
            view += change.reshape(view.shape)

    def add_gradients(self, grad_x: Tensor, x: Tensor, grad: Tensor, weight: Tensor) -> None:
        """Adds the adapters' gradients to their buffers, and to ``grad_x`` that of ``x``; ``grad`` is of the layer's
        outputs.
        """
        first, grad = self._first, self._of_module(grad[self._rows])
        x = x[self._rows]
        kept = dropped(x, self._draw, first)
        through_base: Tensor | None = None
        if first.magnitude is not None and self._norm is not None and first.grad_magnitude is not None:
            columns = self._of_module(weight.t())
            whole = padded_product(kept, columns) + (self._low[0] @ self._b[0].t())[:, : grad.shape[1]]
            first.grad_magnitude.add_((grad * whole).sum(0).to(self._norm.dtype) / self._norm)
            gain = (first.magnitude / self._norm).to(x.dtype)
            through_base, grad = (grad * (gain - 1)) @ columns.t(), grad * gain
        outputs = self._by_adapter(_with_enough_columns(grad))
        # Transposed: a product with few rows takes a fraction of the time of one with few columns.
        add_products([each.grad_b for each in self._factors], torch.bmm(self._low.mT, outputs).mT)
        grad_low = torch.bmm(outputs, self._b).mul_(self._scales)
        add_products([each.grad_a for each in self._factors], torch.bmm(grad_low.mT, self._by_adapter(kept)))
        own = grad_x[self._rows]
        if through_base is None and kept is x:
            self._by_adapter(own).baddbmm_(grad_low, self._a)
            return
        grad_kept = torch.bmm(grad_low, self._a).flatten(0, 1)
        own += dropped(grad_kept if through_base is None else grad_kept.add_(through_base), self._draw, first)

    def _by_adapter(self, x: Tensor) -> Tensor:
        """(adapters * rows, features) -> (adapters, rows, features)"""
        return x.view(len(self._factors), -1, x.shape[1])

    def _stack(self, name: str, dtype: torch.dtype) -> Tensor:
        held = [getattr(each, name) for each in self._factors]
        return (held[0][None] if len(held) == 1 else torch.stack(held)).to(dtype)

    def _scale(self) -> Tensor | float:
        scales = [each.scale for each in self._factors]
        if len(set(scales)) == 1:
            return scales[0]
        return torch.tensor(scales, dtype=self._a.dtype).to(self._a.device, non_blocking=True)[:, None, None]

    def _of_module(self, y: Tensor) -> Tensor:
        return y if self._columns is None else self._columns.of(y).flatten(1)


def _norms_of_rows(weight: Tensor, factors: Factors) -> Tensor:
    changed = weight.float().addmm(factors.b, factors.a, alpha=factors.scale)
    squares = changed.square_().sum(1)
    if factors.sum_over_inputs is not None:
        factors.sum_over_inputs(squares)
    return squares.sqrt_()


def _with_enough_columns(x: Tensor) -> Tensor:
    missing = ENOUGH_COLUMNS - x.shape[-1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def padded_product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ matrix``, with zeros below ``x`` where there are fewer than :data:`ENOUGH_ROWS`, and beside a narrow matrix."""
    rows, columns = x.shape[0], matrix.shape[1]
    if rows < ENOUGH_ROWS:
        x = F.pad(x, (0, 0, 0, ENOUGH_ROWS - rows))
    padded = _with_enough_columns(matrix)
    # The bias is added before anything is rounded.
    product = x @ padded if bias is None else torch.addmm(_with_enough_columns(bias), x, padded)
    return product if product.shape == (rows, columns) else product[:rows, :columns].contiguous()


def add_products(buffers: list[Tensor], products: Tensor) -> None:
    """``products[i]`` added to each of ``buffers``, in their dtype; rows beyond those of the buffers are left out."""
    products = products[:, : buffers[0].shape[0]].to(buffers[0].dtype)
    if len(buffers) == 1:
        buffers[0].add_(products[0])
    else:
        # One kernel for all, where memory is laid out alike.
        torch._foreach_add_(buffers, list(products.contiguous().unbind()))


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
    """Rows of ``weight``, plus ``scale * b @ a[:, token]`` for the tokens of each adapter that has ``name``."""
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
    return factors.a.t()[tokens].mul_(factors.scale)


def _narrow(x: Tensor, factors: Factors) -> Tensor:
    return (x @ factors.a.to(x.dtype).t()).mul_(factors.scale)


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


logger = logging.getLogger(__name__)

_STACKED = 10
_ROWS = _STACKED * ENOUGH_ROWS
_FEATURES = ((64, 16), (128, 192), (512, 64))
_RUNS = ((0, 3), (5, 21), (33, _ROWS))


def rows_are_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether some rows give the same bits alone as beside others, in the products of a linear layer and of an adapter.

    Some milliseconds once for each process, dtype, device and number of threads. A failure is logged.
    """
    # A GPU's library chooses kernels by the number of rows.
    return device.type == "cpu" and _tried(dtype, torch.get_num_threads())


@lru_cache
def _tried(dtype: torch.dtype, num_threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in _FEATURES:
        shapes = (_ROWS, inputs), (outputs, inputs), (_ROWS, outputs)
        x, weight, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        exact = all(_is_exact(x, weight, grad, slice(*run)) for run in _RUNS)
        if not (exact and _stacks_are_exact(x, weight, grad)):
            logger.warning(
                "rows of products of %s matrices on this CPU depend on others (%d threads): LoRA tenants' updates are the "
                "same alone and beside others to rounding, not to the last bit",
                dtype,
                num_threads,
            )
            return False
    return True


def _is_exact(x: Tensor, weight: Tensor, grad: Tensor, run: slice) -> bool:
    own_x, own_grad = x[run].clone(), grad[run].clone()
    return (
        torch.equal(padded_product(own_x, weight.t()), padded_product(x, weight.t())[run])
        and torch.equal(padded_product(own_grad, weight), padded_product(grad, weight)[run])
        and torch.equal(own_grad.t() @ own_x, grad[run].t() @ x[run])
    )


def _stacks_are_exact(x: Tensor, weight: Tensor, grad: Tensor) -> bool:
    xs, grads = (each.view(_STACKED, ENOUGH_ROWS, -1) for each in (x, grad))
    weights = torch.stack([weight.roll(index, 0) for index in range(_STACKED)])

    def alone(product: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
        return torch.cat([product(*one) for one in zip(*(each.split(1) for each in stacks), strict=True)])

    return all(
        torch.equal(torch.bmm(a, b), alone(torch.bmm, a, b))
        and torch.equal(torch.baddbmm(c, a, b), alone(torch.baddbmm, c, a, b))
        for c, a, b in ((grads, xs, weights.mT), (xs, grads, weights), (weights, grads.mT, xs))
    )
