"""What an optimizer's part of the parameters is in the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from rl_backend.runtime.bridge.engine.sharding import Block, StoredRows, pieces_of

SHAPES = ((5, 3), (4, 2), (6,), (2, 3))


def blocks_of(tensors: Sequence[Tensor]) -> list[Block]:
    """Each under a name of Megatron's; the second's rows are those of two tensors of Hugging Face, and one that pads."""
    rows = [None, (StoredRows(0, 1, "gate", (2, 2), 1), StoredRows(1, 3, "up", (2, 2), 0)), None, None]
    return [
        Block(ShardedTensor.from_rank_offsets(f"layer.{number}", tensor, replica_id=(0, 0, number % 2)), tensor, of_tensor)
        for number, (tensor, of_tensor) in enumerate(zip(tensors, rows, strict=True))
    ]


@pytest.mark.parametrize("cuts", [(0, 35), (0, 16, 35), (0, 10, 26, 35), (0, 0, 7, 7, 29, 35)], ids=str)
def test_the_parts_of_all_ranks_are_the_whole_tensors(cuts: Sequence[int]) -> None:
    """Parts begin and end inside of rows, and a rank has nothing of some tensors before, between or after its own."""
    tensors = [torch.zeros(shape) for shape in SHAPES]
    ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0).tolist()
    numbers = torch.arange(1.0, ends[-1] + 1)
    found: dict[str, Tensor] = {}
    for start, end in pairwise(cuts):
        flat = {}
        for tensor, last in zip(tensors, ends, strict=True):
            first = last - tensor.numel()
            low, high = max(start, first), min(end, last)
            if low < high:
                flat[id(tensor)] = (low - first, high - first, numbers[low:high])
        for name, pieces in pieces_of(blocks_of(tensors), flat).items():
            assert pieces.writes
            whole = found.setdefault(name, torch.zeros(tuple(pieces.whole_size)))
            for offsets, piece in pieces.pieces.items():
                place = tuple(slice(at, at + size) for at, size in zip(offsets, piece.shape, strict=True))
                assert not whole[place].any()
                whole[place] = piece
    expected = {
        f"megatron.layer.{number}": numbers[ends[number] - tensors[number].numel() : ends[number]].view(SHAPES[number])
        for number in (0, 2, 3)
    }
    second = numbers[15:23].view(4, 2)
    expected |= {"gate": torch.stack([torch.zeros(2), second[0]]), "up": second[1:3]}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
