"""A name that could not be flushed to the disk is taken back: what is said to have failed is not found."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.folder.checkpoints import RunCheckpoints
from rl_backend.checkpoint.durable_commit import rename_synced
from rl_backend.contracts import CheckpointError
from tests.support.native import open_runtime


@contextmanager
def names_cannot_be_flushed(directory: Path) -> Iterator[None]:
    """The disk fails where the names in ``directory`` are flushed."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise OSError(errno.EIO, "Input/output error")
        flush(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.mark.shows("checkpoints: a save whose directory name could not be flushed fails and leaves no checkpoint")
@pytest.mark.parametrize("settings", [{}, {"hf": True}, {"asynchronous": True}], ids=str)
def test_a_save_whose_name_could_not_be_flushed_is_not_there(
    tied_model: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()

        def save() -> None:
            runtime.save_checkpoint(handle, tmp_path / "saved", **settings)
            runtime.wait_for_checkpoint(handle)

        with names_cannot_be_flushed(tmp_path), pytest.raises(CheckpointError, match="Input/output error"):
            save()
        assert list(tmp_path.iterdir()) == []
        save()
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_a_commit_whose_name_could_not_be_flushed_is_not_there_and_can_be_repeated(tied_model: Path, tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path / "root")
    with open_runtime(tied_model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), checkpoints.draft(1) / "policy")
    with (
        names_cannot_be_flushed(checkpoints.root),
        pytest.raises(CheckpointError, match=r"cannot commit .*Input/output error"),
    ):
        checkpoints.commit(1, {})
    assert checkpoints.steps() == []
    checkpoints.commit(1, {})
    assert checkpoints.latest() is not None


def test_a_committed_checkpoint_is_no_failure_for_want_of_the_link_to_it(
    tied_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = RunCheckpoints(tmp_path / "root")
    with open_runtime(tied_model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), checkpoints.draft(1) / "policy")
    (checkpoints.root / "latest").mkdir()
    checkpoints.commit(1, {})
    assert checkpoints.steps() == [1]
    assert "latest does not point to step-00000001" in caplog.text


def test_a_name_that_cannot_be_taken_back_is_said_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, target: rename(self, target) if target == new else refuse())
    with names_cannot_be_flushed(tmp_path), pytest.raises(OSError, match="Input/output") as caught:
        rename_synced(old, new)
    assert caught.value.__notes__ == [f"{new} stays, as it could not be renamed back: [Errno 30] Read-only file system"]


def refuse() -> Path:
    raise OSError(errno.EROFS, "Read-only file system")
