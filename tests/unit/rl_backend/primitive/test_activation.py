"""Functions of each number of a tensor: bits of a row are those that it has alone, whatever the number of features."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive.activation import ACTIVATIONS, Elementwise, sigmoid, silu, softplus

ROWS = 142
RUNS = ((0, 56), (56, 98), (98, 142), (17, 18))
FUNCTIONS = {"sigmoid": sigmoid, "softplus": softplus, **ACTIVATIONS}


def with_gradient(function: Elementwise, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient of the sum of their squares."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", [1, 2, 4, 24, 33, 64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_bits_that_it_has_alone(name: str, features: int, dtype: torch.dtype) -> None:
    x = 3.0 * torch.randn(ROWS, features, generator=torch.Generator().manual_seed(0))
    together = with_gradient(FUNCTIONS[name], x.to(dtype))
    for start, stop in RUNS:
        alone = with_gradient(FUNCTIONS[name], x[start:stop].to(dtype))
        assert all(torch.equal(own, beside[start:stop]) for own, beside in zip(alone, together, strict=True))


@pytest.mark.parametrize(("function", "reference"), [(sigmoid, torch.sigmoid), (silu, F.silu), (softplus, F.softplus)])
def test_values_and_gradients_are_those_of_torch(function: Elementwise, reference: Elementwise) -> None:
    x = 3.0 * torch.randn(5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(with_gradient(function, x), with_gradient(reference, x), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-14, rtol=1e-12)
