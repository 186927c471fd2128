"""Pieces of tensors in checkpoints."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rl_backend.checkpoint.training_state import HostBuffers, PiecesLoadPlanner, PiecesSavePlanner, TensorPieces, boxes


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 6), (4, 1, 2)], ids=str)
def test_boxes_cover_every_span_of_a_tensor_once_and_in_order(shape: tuple[int, ...]) -> None:
    flat = torch.arange(math.prod(shape))
    whole = flat.view(shape)
    for start, end in combinations_with_replacement(range(flat.numel() + 1), 2):
        found = list(boxes(shape, start, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        position = start
        for box in found:
            assert box.start == position
            piece = whole[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes, strict=True))]
            count = math.prod(box.sizes)
            assert torch.equal(piece.reshape(-1), flat[position : position + count])
            position += count
        assert position == end


def span(whole: torch.Tensor, start: int, end: int) -> TensorPieces:
    """The pieces of one rank whose part of the flattened tensor is ``start`` to ``end``."""
    flat = whole.view(-1)
    found = {
        box.offsets: flat[box.start : box.start + math.prod(box.sizes)].view(box.sizes)
        for box in boxes(whole.shape, start, end)
    }
    return TensorPieces(whole.shape, found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pieces_are_loaded_in_place_whatever_pieces_were_saved(tmp_path: Path) -> None:
    whole = torch.randn(6, 5)
    saved = span(whole, 0, 30)
    saved.pieces.clear()
    for start, end in ((0, 8), (8, 9), (9, 30)):
        saved.pieces.update(span(whole, start, end).pieces)
    state = {"weight": saved, "step": torch.tensor(3.0)}
    save(dict(state), storage_writer=FileSystemWriter(tmp_path / "saved"), planner=PiecesSavePlanner(), no_dist=True)
    for start, end in ((0, 30), (3, 17), (29, 30)):
        target, step = torch.zeros(6, 5), torch.zeros(())
        load(
            {"weight": span(target, start, end), "step": step},
            storage_reader=FileSystemReader(tmp_path / "saved"),
            planner=PiecesLoadPlanner(),
            no_dist=True,
        )
        expected = torch.zeros(30)
        expected[start:end] = whole.view(-1)[start:end]
        assert torch.equal(target.view(-1), expected)
        assert step == 3.0


def test_a_copy_of_what_another_rank_writes_is_not_written() -> None:
    copy = TensorPieces((4,), {(0,): torch.ones(4)}, writes=False)
    assert copy.__create_write_items__("weight", copy) == []
    assert len(copy.__create_chunk_list__()) == 1
    (kept,) = HostBuffers(torch.device("cpu")).copy({"weight": copy}).values()
    assert isinstance(kept, TensorPieces)
    assert kept.pieces == {}


def test_a_host_copy_does_not_change_with_the_original_and_the_next_takes_its_memory() -> None:
    original, step = torch.arange(4.0), torch.tensor(1.0)
    state = {"weight": TensorPieces((4,), {(0,): original}), "step": step}
    buffers = HostBuffers(torch.device("cpu"))
    first, count = buffers.copy(state).values()
    assert isinstance(first, TensorPieces)
    assert isinstance(count, torch.Tensor)
    original.zero_()
    step.zero_()
    assert torch.equal(first.pieces[(0,)], torch.arange(4.0))
    assert count == 1
    second, _ = buffers.copy(state).values()
    assert isinstance(second, TensorPieces)
    assert second.pieces[(0,)].data_ptr() == first.pieces[(0,)].data_ptr()
    assert torch.equal(second.pieces[(0,)], torch.zeros(4))
