"""Drafts that get their names in one step, and what is flushed and taken back."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from rl_backend.checkpoint.durable_commit import (
    commit_draft,
    discard_draft,
    draft_of,
    rename_synced,
    replace_text,
    sync,
    sync_tree,
    with_notes,
    write_synced,
)


class Disk:
    """Notes what is flushed, by path, and fails for those in ``failing``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: list[Path] = []
        self.failing: set[Path] = set()
        flush = os.fsync

        def fsync(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path in self.failing:
                raise OSError(errno.EIO, "Input/output error")
            self.flushed.append(path)
            flush(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_draft_is_hidden_beside_its_path_another_each_time_and_not_made(tmp_path: Path) -> None:
    first, second = draft_of(tmp_path / "saved"), draft_of(tmp_path / "saved")
    assert first != second and first.parent == tmp_path and first.name.startswith(".saved.incomplete-")
    assert list(tmp_path.iterdir()) == []


def test_a_draft_gets_its_name_and_replaces_nothing_not_even_an_empty_directory(tmp_path: Path, disk: Disk) -> None:
    draft, path = tmp_path / ".draft", tmp_path / "saved"
    draft.mkdir()
    (draft / "file").write_text("new")
    path.mkdir()
    with pytest.raises(FileExistsError, match=f"{path} was made by another process while the draft was written"):
        commit_draft(draft, path)
    assert (draft / "file").read_text() == "new" and list(path.iterdir()) == []
    path.rmdir()
    commit_draft(draft, path)
    assert (path / "file").read_text() == "new" and not draft.exists()
    assert disk.flushed == [tmp_path]


def test_a_draft_is_discarded_with_all_that_it_has_and_what_stays_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / ".draft"
    (draft / "below").mkdir(parents=True)
    (draft / "below" / "file").write_text("a part")
    with caplog.at_level(logging.WARNING):
        discard_draft(draft)
        discard_draft(draft)  # as where nothing was made
        assert not draft.exists() and not caplog.messages
        draft.mkdir()
        monkeypatch.setattr(os, "rmdir", lambda *_, **__: refuse())
        discard_draft(draft)
    assert caplog.messages == [f"the incomplete {draft} could not be removed"]


def refuse() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_text_is_flushed_before_its_name_and_a_failure_leaves_the_earlier_one(tmp_path: Path, disk: Disk) -> None:
    file = tmp_path / "record"
    write_synced(file, "ten £\n")
    assert file.read_bytes() == b"ten \xc2\xa3\n" and disk.flushed == [file]
    replace_text(file, "eleven")
    assert file.read_text() == "eleven" and disk.flushed == [file, tmp_path / ".record.new"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]
    disk.failing = {tmp_path / ".record.new"}
    with pytest.raises(OSError, match="Input/output error"):
        replace_text(file, "twelve")
    assert file.read_text() == "eleven"
    disk.failing.clear()
    replace_text(file, "13")
    assert file.read_text() == "13"


def test_everything_below_a_directory_is_flushed_and_its_names_at_last(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("one", "a/two", "a/b/three"):
        (tmp_path / name).write_text(name)
    sync_tree(tmp_path)
    assert disk.flushed[-1] == tmp_path
    assert set(disk.flushed) == {tmp_path, *tmp_path.rglob("*")} and len(disk.flushed) == 6


def test_no_descriptor_stays_open_whether_it_is_flushed_or_not(tmp_path: Path, disk: Disk) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sync(tmp_path)
    disk.failing = {tmp_path}
    with pytest.raises(OSError, match="Input/output error"):
        sync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rename_that_is_not_flushed_is_undone(tmp_path: Path, disk: Disk) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("mine")
    disk.failing = {tmp_path}
    with pytest.raises(OSError, match="Input/output error") as caught:
        rename_synced(old, new)
    assert old.read_text() == "mine" and not new.exists()
    assert not hasattr(caught.value, "__notes__")
    disk.failing.clear()
    rename_synced(old, new)
    assert new.read_text() == "mine" and not old.exists() and disk.flushed == [tmp_path]
    with pytest.raises(FileNotFoundError):
        rename_synced(old, new)
    assert new.read_text() == "mine"


def test_an_error_is_shown_with_all_of_its_notes() -> None:
    error: Any = OSError(errno.EIO, "Input/output error")
    assert with_notes(error) == "[Errno 5] Input/output error"
    error.add_note("first")
    error.add_note("second")
    assert with_notes(error) == "[Errno 5] Input/output error; first; second"
