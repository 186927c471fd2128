"""Which dimension of experts FSDP cuts, and which parameters it need not touch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_backend.parallel.fsdp import _expert_placement, _works_as_it_is


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((4, 3, 5), 2, None),
        ((4, 6, 5), 2, None),
        ((3, 5, 8), 2, 2),
        ((3, 2, 8), 4, 2),
        ((3, 6, 8), 2, 1),
        ((2, 6, 8), 4, 2),
        # Whole experts, unevenly, where nothing divides.
        ((3, 5, 7), 2, None),
        ((3, 5), 1, None),
    ],
)
def test_experts_stay_whole_where_each_rank_gets_as_many_and_are_cut_evenly_elsewhere(
    shape: tuple[int, ...], ranks: int, dim: int | None
) -> None:
    placement = _expert_placement(nn.Parameter(torch.zeros(shape)), ranks=ranks)
    assert (None if placement is None else placement.dim) == dim


@pytest.mark.parametrize(
    ("dtype", "trained", "param_dtype", "reduce_dtype", "works"),
    [
        (torch.float32, True, torch.float32, torch.float32, True),
        (torch.float32, True, torch.float32, torch.bfloat16, False),
        # Gradients that nothing asks for are in no dtype.
        (torch.float32, False, torch.float32, torch.bfloat16, True),
        (torch.float32, False, torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, False, torch.bfloat16, torch.float32, True),
        (torch.bfloat16, True, torch.bfloat16, torch.float32, False),
    ],
)
def test_a_parameter_works_as_it_is_where_neither_it_nor_its_gradient_changes_its_dtype(
    dtype: torch.dtype, trained: bool, param_dtype: torch.dtype, reduce_dtype: torch.dtype, works: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=trained)
    assert _works_as_it_is(parameter, param_dtype, reduce_dtype) is works
