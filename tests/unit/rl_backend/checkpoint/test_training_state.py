"""Collectives of a save and a load: what fails on one rank, and what is left on the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # not in its __all__
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from rl_backend.checkpoint import training_state
from rl_backend.checkpoint.manifest import read_manifest
from rl_backend.checkpoint.training_state import (
    HostBuffers,
    TensorPieces,
    TensorsReader,
    on_every_rank,
    raise_on_every_rank,
    read_training_state,
    require_free,
    reserve_draft,
    told_as_checkpoint_error,
    write_training_state,
)
from rl_backend.contracts import BatchError, CheckpointError, RLBackendError
from tests.support.disk import full_disk
from tests.support.written_checkpoints import manifest_of

GROUP: Any = "the group"


class Ranks:
    """Stands for torch's collectives: the other ranks' answers are given."""

    def __init__(self, *others: str | None, own: int = 0) -> None:
        self.others, self.own, self.calls = others, own, 0

    def gather(self, own: Any, group: Any) -> list[Any]:
        assert group is GROUP
        self.calls += 1
        return [*self.others[: self.own], own, *self.others[self.own :]]


def ranks(monkeypatch: pytest.MonkeyPatch, *others: str | None, own: int = 0) -> Ranks:
    made = Ranks(*others, own=own)
    monkeypatch.setattr(training_state, "gather_objects", made.gather)
    return made


@pytest.mark.parametrize(
    ("own", "others", "message", "failed"),
    [
        ("full", ("full", "full"), "full", [0, 1, 2]),
        ("full", (None, None), "full (on rank 0)", [0]),
        (None, (None, "full"), "full (on rank 2)", [2]),
        ("full", (None, "gone"), "full; gone (on rank 0, 2)", [0, 2]),
        ("full", ("gone", "full"), "full; gone", [0, 1, 2]),
        ("", (None, None), " (on rank 0)", [0]),
    ],
)
def test_a_problem_of_any_rank_is_raised_with_the_ranks_that_have_it(
    monkeypatch: pytest.MonkeyPatch, own: str | None, others: tuple[str | None, ...], message: str, failed: list[int]
) -> None:
    ranks(monkeypatch, *others)
    cause = OSError("mine")
    for kind in (CheckpointError, BatchError):
        with pytest.raises(kind) as caught:
            raise_on_every_rank(own, GROUP, cause, kind)
        assert (str(caught.value), caught.value.details) == (message, {"ranks": failed})
        assert type(caught.value) is kind and caught.value.__cause__ is cause
    with pytest.raises(CheckpointError) as caught:
        raise_on_every_rank(own, GROUP)
    assert caught.value.__cause__ is None


def test_nothing_is_raised_where_no_rank_has_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(monkeypatch, None, None, own=1)
    raise_on_every_rank(None, GROUP)
    with on_every_rank(GROUP, "not said"):
        pass
    assert found.calls == 2


def noted(error: OSError) -> OSError:
    error.add_note("it stays")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (noted(OSError(28, "No space left")), CheckpointError, "cannot do: [Errno 28] No space left; it stays (on rank 1)"),
        (ValueError("odd"), CheckpointError, "cannot do: ValueError: odd (on rank 1)"),
        (CheckpointError("its own words"), CheckpointError, "its own words (on rank 1)"),
        (CheckpointError("its words"), BatchError, "cannot do: CheckpointError: its words (on rank 1)"),
        (BatchError("its own words"), BatchError, "its own words (on rank 1)"),
    ],
)
def test_what_a_body_raises_is_told_to_all_ranks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[RLBackendError], message: str
) -> None:
    ranks(monkeypatch, None, own=1)
    with pytest.raises(kind) as caught, on_every_rank(GROUP, "cannot do", kind):
        raise error
    assert str(caught.value) == message and caught.value.__cause__ is error


def test_an_interrupt_of_a_body_is_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks(monkeypatch, None)
    with pytest.raises(KeyboardInterrupt), on_every_rank(GROUP, "cannot do"):
        raise KeyboardInterrupt
    assert found.calls == 0
    ranks(monkeypatch, "full")
    with pytest.raises(CheckpointError, match=r"^full \(on rank 1\)$"), on_every_rank(GROUP, "cannot do"):
        pass


def test_an_interrupt_is_raised_on_its_own_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CheckpointException("", {0: (KeyboardInterrupt(), None), 1: (OSError("full"), None)})  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt), told_as_checkpoint_error("failed"):
        raise error
    for rank in (1, 2):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        with pytest.raises(CheckpointError) as caught, told_as_checkpoint_error("failed", GROUP):
            raise error
        assert str(caught.value) == "failed: rank 0: KeyboardInterrupt: ; rank 1: OSError: full"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_state_is_written_with_its_manifest_and_read_into_other_pieces(group: Any, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "saved"
    draft = reserve_draft(path, group)
    assert draft.parent == path.parent and draft.is_dir() and draft.name.startswith(".saved.incomplete-")
    whole = torch.arange(21.0).view(3, 7)
    state: dict[str, Any] = {"w": TensorPieces((3, 7), {(0, 0): whole[:2], (2, 0): whole[2:]}), "step": torch.tensor(4)}
    write_training_state(draft, path, state, manifest_of(extra={"a": 1}), group)
    manifest = read_manifest(path)
    manifest.require_files(path)
    assert not draft.exists() and manifest.extra == {"a": 1} and manifest.files.keys() == {".metadata", "__0_0.distcp"}
    target, step = torch.zeros(3, 7), torch.tensor(0)
    read_training_state(
        TensorsReader(path, manifest.files), {"w": TensorPieces((3, 7), {(1, 3): target[1:, 3:]}), "step": step}, group
    )
    assert torch.equal(target[1:, 3:], whole[1:, 3:]) and not target[0].any() and not target[:, :3].any() and step == 4
    with pytest.raises(CheckpointError, match=rf"{path} exists; a checkpoint is written to a new directory, choose another"):
        reserve_draft(path, group)
    with pytest.raises(CheckpointError, match="exists"):
        require_free(path)
    require_free(draft)


def test_a_directory_that_cannot_be_made_is_named(group: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"cannot make a directory beside {tmp_path}/file/saved: .*Not a directory"):
        reserve_draft(tmp_path / "file" / "saved", group)


@pytest.mark.parametrize("failing", ["full disk", "name", "interrupt"])
def test_a_write_that_fails_leaves_neither_a_checkpoint_nor_a_draft(
    group: Any, tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "saved"
    draft = reserve_draft(path, group)
    state = {"w": torch.zeros(50_000)}

    def write() -> None:
        write_training_state(draft, path, state, manifest_of(), group)

    if failing == "full disk":
        message = rf"{path} could not be written: rank 0: OSError: \[Errno 27\] File too large: '{draft}/__0_0\.distcp'"
        with full_disk(True), pytest.raises(CheckpointError, match=message):
            write()
    elif failing == "name":
        monkeypatch.setattr(training_state, "commit_draft", lambda *_: (_ for _ in ()).throw(OSError(5, "no name")))
        with pytest.raises(CheckpointError, match=rf"cannot complete {path}: \[Errno 5\] no name"):
            write()
    else:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write()
    assert list(path.parent.iterdir()) == []


def test_a_read_that_fails_says_the_rank_and_the_file(group: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "saved"
    with caplog.at_level(logging.CRITICAL):
        write_training_state(reserve_draft(path, group), path, {"w": torch.ones(3)}, manifest_of(), group)
        reader = TensorsReader(path, read_manifest(path).files)
        (path / "__0_0.distcp").unlink()
        with pytest.raises(
            CheckpointError, match=rf"^{path} could not be read: rank 0: CheckpointError: {path}/__0_0\.distcp is refused"
        ):
            read_training_state(reader, {"w": torch.zeros(3)}, group)


def test_pieces_are_described_to_torch_as_shards_of_the_whole() -> None:
    whole = torch.zeros(5, 4, dtype=torch.bfloat16)
    pieces = TensorPieces([5, 4], {(0, 1): whole[:2, 1:], (2, 0): whole[2:]})
    first, second = pieces.__create_write_items__("w", pieces)
    assert [item.index.offset for item in (first, second)] == [torch.Size([0, 1]), torch.Size([2, 0])]
    assert second.index.fqn == "w" and second.type.name == "SHARD" and second.tensor_data is not None
    assert second.tensor_data.size == torch.Size([5, 4])
    assert (second.tensor_data.chunk.offsets, second.tensor_data.chunk.sizes) == (torch.Size([2, 0]), torch.Size([3, 4]))
    assert second.tensor_data.properties.dtype == torch.bfloat16
    assert [(each.offsets, each.sizes) for each in pieces.__create_chunk_list__()] == [((0, 1), (2, 3)), ((2, 0), (3, 4))]
    assert pieces.piece(MetadataIndex("w", torch.Size([2, 0]))).data_ptr() == whole[2:].data_ptr()


def test_a_host_buffer_is_made_anew_for_another_shape_or_dtype_and_pieces_have_their_own() -> None:
    buffers = HostBuffers(torch.device("cpu"))

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        (copy,) = buffers.copy({"w": tensor}).values()
        assert isinstance(copy, torch.Tensor)
        return copy

    first = copied(torch.ones(4, requires_grad=True))
    assert not first.requires_grad
    for other in (torch.full((2, 2), 2.0), torch.full((4,), 3, dtype=torch.int64), torch.full((4,), 0.5)):
        assert torch.equal(copied(other), other)
    whole = torch.arange(4.0)
    pieces = TensorPieces((4,), {(0,): whole[:2], (2,): whole[2:]})
    (copy,) = buffers.copy({"w": pieces}).values()
    assert isinstance(copy, TensorPieces) and copy.whole_size == torch.Size([4]) and copy.writes
    assert [copy.pieces[offsets].tolist() for offsets in ((0,), (2,))] == [[0, 1], [2, 3]]
    assert pieces.pieces.keys() == copy.pieces.keys()


def test_tensors_of_any_size_and_dtype_are_copied_beside_each_other() -> None:
    whole = torch.arange(35.0).view(5, 7)
    state: dict[str, Any] = {
        "w": TensorPieces((5, 7), {(0, 0): whole[:2, :3], (2, 0): whole[2:].t().contiguous().t()}),
        "other": TensorPieces((4,), {(0,): torch.ones(4)}, writes=False),
        "bits": torch.arange(5, dtype=torch.bfloat16),
        "none": TensorPieces((3,), {}),
        "step": torch.tensor(9),
        "empty": torch.zeros(0, 2),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    expected = {"bits": [0, 1, 2, 3, 4], "step": 9, "empty": [], "bytes": [0, 1, 2]}
    copy = HostBuffers(torch.device("cpu")).copy(state)
    right = whole.clone()
    for tensor in (*state["w"].pieces.values(), whole, state["bits"], state["step"], state["bytes"]):
        tensor.zero_()
    assert list(copy) == list(state)
    for name, numbers in expected.items():
        found = copy[name]
        assert isinstance(found, torch.Tensor) and found.dtype == state[name].dtype and found.tolist() == numbers
        assert found.shape == state[name].shape
    pieces = {name: each for name, each in copy.items() if isinstance(each, TensorPieces)}
    assert {name: (tuple(each.whole_size), each.writes, list(each.pieces)) for name, each in pieces.items()} == {
        "w": ((5, 7), True, [(0, 0), (2, 0)]),
        "other": ((4,), False, []),
        "none": ((3,), True, []),
    }
    assert torch.equal(pieces["w"].pieces[0, 0], right[:2, :3]) and torch.equal(pieces["w"].pieces[2, 0], right[2:])
