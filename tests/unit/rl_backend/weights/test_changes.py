"""Patches of tensors: bit for bit, whatever the values, the shape and the share that changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import WeightCheckError
from rl_backend.weights.changes import Patch, apply_patch, empty_table, make_patch, payload_bytes
from rl_backend.weights.inspection import BLOCK_BYTES, block_threads, same_bytes

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(BITS[tensor.itemsize])


def sent(held: Tensor, now: Tensor, place: Tensor | None = None) -> Patch:
    """The patch from one tensor to the other, after it was applied to what a receiver has: ``held``, or ``place``."""
    receiver = (held if place is None else place).clone()
    keeps = held.clone()
    patch = make_patch(keeps, now)
    assert same_bytes(keeps, now), "the sender's copy follows"
    table = empty_table(receiver)
    assert table.shape == patch.table.shape and payload_bytes(receiver, patch.table) == patch.payload.nbytes
    apply_patch(receiver, Patch(table.copy_(patch.table), patch.payload.clone()))
    if place is None:
        assert same_bytes(receiver, now)
        assert patch.changed == int((bits(held) != bits(now)).sum())
    else:
        assert not same_bytes(receiver, now)
    return patch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("share", [0.0, 1e-5, 0.02, 0.5])
@pytest.mark.parametrize("elements", [0, 1, 3 * BLOCK_BYTES // 2 + 7])
def test_a_patch_brings_a_tensor_to_the_bits_of_another(dtype: torch.dtype, share: float, elements: int) -> None:
    torch.manual_seed(elements)
    held = torch.randn(elements).mul(9).to(dtype)
    now = torch.where(torch.rand(elements) < share, torch.randn(elements).mul(9).to(dtype), held)
    patch = sent(held, now)
    assert patch.payload.nbytes <= now.nbytes, "all of a run is never more than the run"


def test_a_patch_takes_a_byte_for_each_gap_that_one_holds() -> None:
    held = torch.zeros(500_000, dtype=torch.bfloat16)
    now = held.clone()
    now[::100] = 1.0
    assert sent(held, now).payload.nbytes == 5_000 * (1 + 2)
    # Gaps of 1,999 take seven codes of more than 255, and one, or a number of two bytes.
    now = held.clone()
    now[::2_000] = 1.0
    assert sent(held, now).payload.nbytes == 250 * (2 + 2)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_533, 65_534, 65_535, 65_536, 131_069, 131_070])
def test_gaps_at_the_edges_of_their_codes_keep_their_place(gap: int) -> None:
    for first in (0, 1, gap):
        held = torch.zeros(BLOCK_BYTES // 2, dtype=torch.bfloat16)
        now = held.clone()
        now[first] = 1.0
        now[first + 1 + gap] = 2.0
        now[-1] = 3.0
        assert sent(held, now).changed == 3


def test_elements_on_both_sides_of_a_run_are_not_taken_for_each_other() -> None:
    run = BLOCK_BYTES // 4
    held = torch.arange(3.0 * run)
    now = held.clone()
    now[[0, run - 1, run, 2 * run - 1, 2 * run]] *= -1
    patch = sent(held, now)
    assert patch.table[:, 0].tolist() == [2, 2, 1]
    with block_threads(3) as pool:
        threaded = make_patch(held.clone(), now, pool)
    assert all(torch.equal(one, other) for one, other in zip(patch, threaded, strict=True))


def test_zeros_of_both_signs_and_all_nans_differ_where_their_bits_do() -> None:
    words = torch.tensor([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F80, 0xFF80, 0x3F80], dtype=torch.int32)
    values = words.to(torch.int16).view(torch.bfloat16).repeat(64)
    for shift in range(8):
        other = values.roll(shift)
        patch = sent(values, other)
        assert patch.changed == (0 if shift == 0 else len(values))
    # Of values, -0.0 is 0.0, and no NaN is what it was.
    held = torch.zeros(1_000, dtype=torch.bfloat16)
    held[5] = torch.nan
    now = held.clone()
    now[7] = -0.0
    assert sent(held, now).changed == 1


def test_what_changed_in_most_of_a_run_is_sent_whole_and_the_other_runs_are_not() -> None:
    run = BLOCK_BYTES // 2
    held = torch.zeros(3 * run, dtype=torch.bfloat16)
    now = held.clone()
    now[run : 2 * run] = 1.0
    now[-1] = 1.0
    patch = sent(held, now)
    assert patch.table[:, :2].tolist() == [[0, 1], [run, 0], [1, 2]]
    assert patch.payload.nbytes < BLOCK_BYTES + 100
    assert patch.nbytes == patch.payload.nbytes + 3 * 3 * 8


def test_a_patch_on_another_version_leaves_other_bits() -> None:
    torch.manual_seed(0)
    held = torch.randn(40_000).to(torch.bfloat16)
    now, other = held.clone(), held.clone()
    now[::50] *= 2
    other[10] *= 2
    sent(held, now, place=other)


def test_a_patch_of_something_else_is_refused() -> None:
    held = torch.zeros(1_000, dtype=torch.bfloat16)
    now = held.clone()
    now[[4, 900]] = 1.0
    patch = make_patch(held.clone(), now)
    with pytest.raises(WeightCheckError, match="a patch changes 2 elements"):
        apply_patch(torch.zeros(500, dtype=torch.bfloat16), patch)
    table = patch.table.clone()
    table[0, 0], table[0, 2] = 1, table[0, 2] + 1
    with pytest.raises(WeightCheckError, match=r"elements .* not 1"):
        apply_patch(held, Patch(table, patch.payload))


def test_a_parameters_memory_can_still_be_offloaded() -> None:
    parameter = torch.nn.Parameter(torch.ones(1_000))
    make_patch(torch.zeros(1_000), parameter.detach())
    parameter.detach().untyped_storage().resize_(0)
