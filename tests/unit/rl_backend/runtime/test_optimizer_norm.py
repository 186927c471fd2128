"""Sums of squares of gradients."""

from __future__ import annotations

import pytest
import torch

from rl_backend.runtime.optimizer import sum_of_squares


def test_the_squares_of_a_large_tensor_add_up_to_all_digits() -> None:
    """In float32 this sum would be 7e-5 too small."""
    gradient = torch.randn(4099, 896, generator=torch.Generator().manual_seed(0))
    expected = float(gradient.double().square().sum())
    assert float(sum_of_squares([gradient])) == pytest.approx(expected, rel=1e-12)
    assert float(sum_of_squares([gradient.T, gradient[:0]])) == pytest.approx(expected, rel=1e-12)
    assert float(sum_of_squares(gradient.split(1000))) == pytest.approx(expected, rel=1e-12)


def test_squares_beyond_float32_are_finite_and_infinite_elements_are_not() -> None:
    assert float(sum_of_squares([torch.full((3,), 1e25)])) == pytest.approx(3e50)
    assert float(sum_of_squares([torch.ones(3), torch.tensor([1.0, -torch.inf])])) == torch.inf
    assert bool(sum_of_squares([torch.tensor([torch.nan, 1.0])]).isnan())
