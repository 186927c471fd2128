"""Products of groups of rows with a matrix each: what is put off, frozen, planned and padded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.backward import put_off_weight_gradients
from rl_backend.primitive.grouped_linear import grouped_linear, grouped_product, spread_evenly

COUNTS = (3, 0, 18, 1)


def by_group(x: Tensor, matrices: Tensor, counts: Sequence[int]) -> Tensor:
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(list(counts)), matrices, strict=True)])


@pytest.mark.parametrize("columns", [3, 20])
def test_a_product_without_a_gradient_is_that_of_each_group(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrices = (torch.randn(shape, generator=generator) for shape in ((sum(COUNTS), 5), (len(COUNTS), 5, columns)))
    found = grouped_product(x, matrices, torch.tensor(COUNTS))
    torch.testing.assert_close(found, by_group(x, matrices, COUNTS))
    # A row has the bits that it has alone.
    alone = grouped_product(x[2:3], matrices, torch.tensor([1, 0, 0, 0]))
    assert torch.equal(found[2:3], alone)


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_weights_that_are_put_off_are_the_same(turned: bool) -> None:
    """Of a matrix that lies the other way round too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), 5, generator=generator, requires_grad=True)
    stored = torch.randn(len(COUNTS), *((5, 7) if turned else (7, 5)), generator=generator, requires_grad=True)
    mix = torch.randn(sum(COUNTS), 7, generator=generator)

    def product() -> Tensor:
        weight = stored.transpose(1, 2) if turned else stored
        return (grouped_linear(x, weight, torch.tensor(COUNTS)) * mix).sum()

    weight = stored.transpose(1, 2) if turned else stored
    expected = torch.autograd.grad((by_group(x, weight.mT, COUNTS) * mix).sum(), (x, stored))
    torch.testing.assert_close(torch.autograd.grad(product(), (x, stored)), expected)
    assert not expected[1][1].any()
    with put_off_weight_gradients() as later:
        product().backward()
    assert stored.grad is None
    torch.testing.assert_close(x.grad, expected[0])
    if not turned:
        later.compute()
        torch.testing.assert_close(stored.grad, expected[1])
        assert not later


@pytest.mark.parametrize(("of_x", "of_weight"), [(False, True), (True, False)])
def test_only_gradients_that_are_asked_for_are_there(of_x: bool, of_weight: bool) -> None:
    x, weight = torch.randn(4, 3, requires_grad=of_x), torch.randn(2, 5, 3, requires_grad=of_weight)
    grouped_linear(x, weight, torch.tensor([1, 3])).sum().backward()
    assert (x.grad is not None) is of_x and (weight.grad is not None) is of_weight


def test_no_rows_at_all_give_gradients_of_zero() -> None:
    x, weight = torch.randn(0, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    found = grouped_linear(x, weight, torch.tensor([0, 0]))
    assert found.shape == (0, 5)
    found.sum().backward()
    assert weight.grad is not None and not weight.grad.any() and weight.grad.shape == weight.shape


@pytest.mark.parametrize(
    ("rows", "groups", "expected"),
    [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (11, 4, [3, 3, 3, 2])],
)
def test_rows_that_nobody_has_counted_are_spread_evenly(rows: int, groups: int, expected: list[int]) -> None:
    assert spread_evenly(rows, groups) == expected


def test_a_plan_needs_no_counts() -> None:
    x, weight = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((7, 3), (2, 5, 3)))
    counts = torch.empty(2, dtype=torch.int64, device="meta")
    found = grouped_linear(x, weight, counts)
    found.sum().backward()
    assert found.shape == (7, 5) and x.grad is not None and weight.grad is not None
    assert x.grad.shape == x.shape and weight.grad.shape == weight.shape
    assert grouped_product(x, weight.mT, counts).shape == (7, 5)
