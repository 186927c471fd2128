"""Checkpoints that take the place of earlier ones in verl's directories, killed at any moment."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from adapters.verl.checkpoints import finish_replacing, found_name, replacing
from rl_backend.contracts import CheckpointError
from tests.support.kills import killed_at


def as_a_group(folder: Path, work: Callable[[], None]) -> None:
    """Does ``work`` as the only rank."""
    store = dist.FileStore(str(folder / f"store-{uuid.uuid4().hex}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        work()
    finally:
        dist.destroy_process_group()


def in_a_fork(folder: Path, work: Callable[[], None], event: int = -1) -> bool:
    """Whether it was killed at the ``event``-th change of ``folder / "run"``. Threads of gloo do not outlive a fork."""
    return killed_at(event, str(folder / "run"), lambda: as_a_group(folder, work))


def written(path: Path, text: str) -> None:
    with replacing(path) as new:
        new.mkdir()
        (new / "weights").write_text(text)


@pytest.mark.shows("verl: replacing a checkpoint, killed at any moment, leaves the old or the new one")
def test_whenever_it_is_killed_the_old_or_the_new_one_is_found(tmp_path: Path) -> None:
    found, event = [], 0
    path = tmp_path / "run" / "training_state"
    path.parent.mkdir()
    in_a_fork(tmp_path, lambda: written(path, "old"))
    while True:
        killed = in_a_fork(tmp_path, lambda: written(path, "new"), event)
        before = (found_name(path) / "weights").read_text()
        in_a_fork(tmp_path, lambda: finish_replacing(path))
        assert (path / "weights").read_text() == before
        found.append(before)
        in_a_fork(tmp_path, lambda: written(path, "old"))
        assert (path / "weights").read_text() == "old"
        assert [entry.name for entry in path.parent.iterdir()] == ["training_state"]
        if not killed:
            break
        event += 1
    assert set(found) == {"old", "new"}
    assert event > 4


def test_one_that_cannot_take_the_place_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run" / "training_state"
    path.parent.mkdir()
    flush, parent = os.fsync, path.parent.stat()

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), parent):
            raise OSError(errno.EIO, "Input/output error")
        flush(descriptor)

    def fail() -> None:
        written(path, "old")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(CheckpointError, match=r"could not take the place .*Input/output"):
                written(path, "new")
        assert (path / "weights").read_text() == "old"
        written(path, "new")
        assert (path / "weights").read_text() == "new"

    as_a_group(tmp_path, fail)
