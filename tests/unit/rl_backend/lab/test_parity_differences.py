"""Two measures of an activation's difference: its norm, and a factor that all elements share."""

from __future__ import annotations

import pytest
import torch

from rl_backend.lab.parity.compare import COMMON_FACTOR_SHARE, activation_difference

TOLERANCE = 1e-4


def activations() -> torch.Tensor:
    return torch.randn(64, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_factor_that_all_elements_share_is_found_where_the_norm_says_nothing() -> None:
    reference = activations()
    factor = 2 * COMMON_FACTOR_SHARE * TOLERANCE
    found = activation_difference("layer", reference, reference * (1 + factor), TOLERANCE)
    assert found.over and found.measure == "common factor"
    assert found.amount == pytest.approx(factor)
    # As a difference of the norm alone it would be a tenth of the tolerance.
    assert factor < TOLERANCE / 5


def test_rounding_of_the_same_size_has_no_common_factor() -> None:
    reference = activations()
    size = 2 * COMMON_FACTOR_SHARE * TOLERANCE
    noise = torch.randn(reference.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert not activation_difference("layer", reference, reference * (1 + size * noise), TOLERANCE).over
