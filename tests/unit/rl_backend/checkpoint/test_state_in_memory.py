"""A training state in memory: what ranks have written, read into other pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined] # not in its __all__
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from rl_backend.checkpoint.state_in_memory import StateInMemory, write_state
from rl_backend.checkpoint.training_state import TensorPieces, read_training_state
from rl_backend.contracts import CheckpointError
from tests.support.written_checkpoints import manifest_of


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def written(*states: dict[str, Any]) -> StateInMemory:
    memories: list[Tensor] = []
    tables = []
    for rank, state in enumerate(states):

        def room(nbytes: int) -> Tensor:
            memories.append(torch.full((nbytes + 100,), 7, dtype=torch.uint8))
            return memories[-1]

        tables.append(write_state(state, manifest_of(extra={"rank": rank}), room))
    return StateInMemory("what was held", tables, lambda rank, start, end: memories[rank][start:end])


def test_pieces_of_all_ranks_are_read_into_others(group: Any) -> None:
    whole, bits = torch.arange(21.0).view(3, 7), torch.arange(5, dtype=torch.bfloat16)
    first = {
        "w": TensorPieces((3, 7), {(0, 0): whole[:2, :5].t().contiguous().t(), (2, 0): whole[2:]}),
        "copy": TensorPieces((2,), {(0,): torch.zeros(2)}, writes=False),
        "bits": bits,
        "step": torch.tensor(4),
        "random.cpu.0": torch.tensor([1, 2, 3], dtype=torch.uint8),
    }
    second = {
        "w": TensorPieces((3, 7), {(0, 5): whole[:2, 5:]}),
        "copy": TensorPieces((2,), {(0,): torch.ones(2)}),
        "bits": bits,
        "none": TensorPieces((4,), {}),
        "step": torch.tensor(4),
    }
    state = written(first, second)
    assert state.manifest.extra == {"rank": 0} and str(Path(state)) == "what was held"
    target, step, copied = torch.zeros(3, 7), torch.tensor(0), torch.zeros(2)
    found = torch.zeros(5, dtype=torch.float32)
    wanted = {
        "w": TensorPieces((3, 7), {(1, 3): target[1:, 3:], (0, 0): target[:1, :6]}),
        "copy": TensorPieces((2,), {(0,): copied}, writes=False),
        "bits": found,
        "step": step,
    }
    read_training_state(state.reader(), wanted, group)
    expected = whole.clone()
    expected[0, 6] = expected[1:, :3] = 0
    assert torch.equal(target, expected) and step == 4 and torch.equal(found, bits.float()) and copied.tolist() == [1, 1]
    random = torch.zeros(3, dtype=torch.uint8)
    read_training_state(state.reader(), {"random.cpu.0": random}, group)
    assert random.tolist() == [1, 2, 3]


def test_what_is_not_there_is_named() -> None:
    reader = written({"w": torch.zeros(3)}).reader()
    reader.require_stored("w", (3,), torch.bfloat16)
    for name, shape, dtype, problem in (
        ("v", (3,), torch.float32, "does not have it, v was expected in shape"),
        ("w", (4,), torch.float32, r"has it in shape \(3,\)"),
        ("w", (3,), torch.int64, "has it as float32"),
    ):
        with pytest.raises(CheckpointError, match=f"what was held is damaged: .*{problem}"):
            reader.require_stored(name, shape, dtype)


def test_a_rank_that_writes_nothing_has_a_table_alone(group: Any) -> None:
    copy = {"w": TensorPieces((3,), {(0,): torch.zeros(3)}, writes=False)}
    state = written({}, copy, {"w": torch.arange(3.0)})
    target = torch.zeros(3)
    read_training_state(state.reader(), {"w": target}, group)
    assert target.tolist() == [0, 1, 2] and state.manifest.extra == {"rank": 0}
    start, end = write_state(copy, manifest_of(), lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    assert start == 0 < end


def test_what_every_rank_has_is_one_piece_of_the_first_rank_that_wrote_it() -> None:
    first, second = torch.arange(3.0), torch.arange(3.0) + 10
    state = written({}, {"bits": first, "step": torch.tensor(4)}, {"bits": second, "step": torch.tensor(4)})
    told = state.metadata.state_dict_metadata
    assert isinstance(told["bits"], TensorStorageMetadata) and len(told["bits"].chunks) == 1
    assert state.piece(MetadataIndex("bits", (0,))).tolist() == first.tolist()
