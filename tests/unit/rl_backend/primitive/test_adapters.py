"""Adapters beside a frozen linear layer: neighbours of equal shape in one product, each with the bits that it has alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.adapters import AdapterRun, Factors, adapted_linear, adapters_at_work, padded_product, stacks_of

INPUTS, OUTPUTS = 48, 80
NAME = "q_proj"


def adapter(rank: int, scale: float, seed: int, dropout: float = 0.0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) for shape in ((rank, INPUTS), (OUTPUTS, rank)))
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, dropout, seed)


def runs_of(adapters: Sequence[tuple[Factors, int]], start: int = 0) -> list[AdapterRun]:
    """The adapters one after the other, each on so many rows."""
    runs = []
    for factors, rows in adapters:
        runs.append(AdapterRun(start, start + rows, {NAME: factors}, draw=3))
        start += rows
    return runs


def run(x: Tensor, weight: Tensor, runs: Sequence[AdapterRun]) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient of the inputs, of the sum of squares."""
    x = x.clone().requires_grad_()
    with adapters_at_work(runs):
        y = adapted_linear(x, weight, None, {NAME: None})
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("rows", [(16, 16, 16, 16), (16, 5, 5, 40), (1, 1, 700, 700)])
def test_each_adapter_gives_the_bits_that_it_gives_alone(weight: Tensor, rows: Sequence[int]) -> None:
    settings = [(16, 2.0, 1), (16, 0.5, 2), (32, 1.0, 3), (32, 1.0, 4)]
    together = [adapter(*each) for each in settings]
    x = torch.randn(sum(rows), INPUTS, generator=torch.Generator().manual_seed(0))
    runs = runs_of(list(zip(together, rows, strict=True)))
    y, grad_x = run(x, weight, runs)
    for at_work, mine, each in zip(runs, together, settings, strict=True):
        alone = adapter(*each)
        place = slice(at_work.start, at_work.stop)
        own_y, own_grad = run(x[place], weight, runs_of([(alone, at_work.stop - at_work.start)]))
        for found, expected in ((y[place], own_y), (grad_x[place], own_grad)):
            assert torch.equal(found, expected)
        assert torch.equal(mine.grad_a, alone.grad_a) and torch.equal(mine.grad_b, alone.grad_b)


def test_outputs_and_gradients_are_those_of_autograd(weight: Tensor) -> None:
    adapters = [adapter(16, 2.0, 1), adapter(16, 0.5, 2)]
    x = torch.randn(40, INPUTS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    y, grad_x = run(x, weight, runs_of([(each, 16) for each in adapters]))
    leaves = [(each.a.clone().requires_grad_(), each.b.clone().requires_grad_()) for each in adapters]
    inputs = x.clone().requires_grad_()
    changes = [
        each.scale * inputs[16 * index : 16 * index + 16] @ a.t() @ b.t()
        for index, (each, (a, b)) in enumerate(zip(adapters, leaves, strict=True))
    ]
    expected = inputs @ weight.t() + torch.cat([*changes, torch.zeros(8, OUTPUTS)])
    expected.square().sum().backward()
    assert inputs.grad is not None
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(grad_x, inputs.grad)
    for each, (a, b) in zip(adapters, leaves, strict=True):
        torch.testing.assert_close(each.grad_a, a.grad)
        torch.testing.assert_close(each.grad_b, b.grad)


def test_neighbours_of_equal_shape_share_a_stack_unless_they_drop_or_are_one() -> None:
    first, second, wide, dropping = adapter(16, 1.0, 1), adapter(16, 2.0, 2), adapter(32, 1.0, 3), adapter(16, 1.0, 4, 0.5)

    def sizes(*adapters: tuple[Factors, int]) -> list[int]:
        return [len(stack) for stack in stacks_of(runs_of(adapters), NAME)]

    assert sizes((first, 16), (second, 16)) == [2]
    assert sizes((first, 16), (second, 17)) == [1, 1]
    assert sizes((first, 16), (wide, 16), (second, 16)) == [1, 1, 1]
    assert sizes((first, 16), (second, 16), (first, 16)) == [2, 1]
    assert sizes((first, 16), (dropping, 16), (second, 16)) == [1, 1, 1]
    apart = [*runs_of([(first, 16)]), *runs_of([(second, 16)], start=20)]
    assert [len(stack) for stack in stacks_of(apart, NAME)] == [1, 1]
    assert stacks_of(apart, "k_proj") == []


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_rows_of_narrow_products_do_not_depend_on_others(columns: int) -> None:
    x, matrix = (torch.randn(size, 64, generator=torch.Generator().manual_seed(size)) for size in (142, columns))
    together = padded_product(x, matrix.t())
    torch.testing.assert_close(together, x @ matrix.t())
    for run in (slice(0, 56), slice(56, 98), slice(98, 142), slice(5, 6)):
        assert torch.equal(padded_product(x[run], matrix.t()), together[run])
