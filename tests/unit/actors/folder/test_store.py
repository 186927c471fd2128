"""A run's store of checkpoints: what is removed, what ``latest`` names, and what is only warned of."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors.folder.checkpoints import RunCheckpoints, models_among, read_run_checkpoint
from rl_backend.contracts import CheckpointError, RunFolderError
from tests.unit.actors.folder.test_checkpoints import committed, latest, names, save


def test_numbers_of_steps_are_compared_and_not_their_names(tmp_path: Path) -> None:
    store = committed(tmp_path, 9, 100, 99_999_999, 123_456_789)
    for name in ("step-5", "step-0000000x", "step-00000005.old", "notes", ".step-00000007.removed-0011aabb"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000300").write_text("no directory")
    assert store.steps() == [9, 100, 99_999_999, 123_456_789] and latest(store).step == 123_456_789
    assert store.draft(123_456_790).name == ".step-123456790.incomplete"
    with pytest.raises(CheckpointError, match=r"has a checkpoint of step 123456789, so one of step 123456789 would not"):
        store.draft(123_456_789)


@pytest.mark.parametrize(("keep", "left"), [(None, [2, 4, 6, 8]), (1, [8]), (3, [4, 6, 8]), (9, [2, 4, 6, 8])])
def test_so_many_checkpoints_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    committed(tmp_path / "all", 2, 4, 6, 8)
    store = RunCheckpoints(tmp_path / "all", keep)
    store.clean_up()
    assert store.steps() == left == committed(tmp_path / "each", 2, 4, 6, 8, keep_last=keep).steps()
    assert names(tmp_path / "each") == ["latest", *(f"step-{step:08d}" for step in left)]


def test_a_clean_up_leaves_what_is_none_of_the_runs(tmp_path: Path) -> None:
    store = committed(tmp_path, 2, 4)
    theirs = ["notes", ".step-3.incomplete", ".step-00000004.incomplete.bak", "step-00000004.incomplete", ".hidden"]
    ours = [".step-00000006.incomplete", ".step-00000001.removed-0123abcd", ".latest.new"]
    for name in theirs + ours[:2]:
        (tmp_path / name).mkdir()
    (tmp_path / ".latest.new").symlink_to("nowhere")
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-00000002")
    store.clean_up()
    assert names(tmp_path) == sorted([*theirs, "latest", "step-00000002", "step-00000004"])
    assert read_run_checkpoint(tmp_path / "latest").step == 4


def refusing(function: Any, name: str) -> Any:
    def refuse(self: Path, *arguments: Any, **options: Any) -> Any:
        if name in self.name:
            raise OSError(errno.EIO, "broken", str(self))
        return function(self, *arguments, **options)

    return refuse


def test_a_commit_stands_where_only_its_link_or_an_old_one_is_in_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = committed(tmp_path, 2, 4, keep_last=2)
    save(store, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refusing(Path.symlink_to, ".latest.new"))
        patch.setattr(Path, "rename", refusing(Path.rename, "step-00000002"))
        assert store.commit(6, {"x": 1}).step == 6
    assert f"{tmp_path}/latest does not point to step-00000006: [Errno 5] broken" in caplog.text
    assert f"the old checkpoint {tmp_path}/step-00000002 could not be removed" in caplog.text
    assert store.steps() == [2, 4, 6] and latest(store).step == 6
    with monkeypatch.context() as patch:
        patch.setattr(Path, "symlink_to", refusing(Path.symlink_to, ".latest.new"))
        store.clean_up()
    assert caplog.text.count(f"{tmp_path}/latest does not point to step-00000006: [Errno 5] broken") == 2
    store.clean_up()
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000006"]


def test_a_commit_that_the_file_system_refuses_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = committed(tmp_path, 2)
    save(store, 4)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        patch.setattr(os, "replace", refuse)
        with pytest.raises(CheckpointError, match=rf"^cannot commit {tmp_path}/step-00000004: .*No space left") as raised:
            store.commit(4, {})
    assert raised.value.details["path"] == f"{tmp_path}/step-00000004" and store.steps() == [2]
    assert store.commit(4, {}).step == 4
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"/file/deep/\.step-00000001\.incomplete cannot be written: "):
        RunCheckpoints(tmp_path / "file" / "deep").make_draft(1)
    draft = RunCheckpoints(tmp_path / "new" / "deep").make_draft(1)
    assert draft.is_dir() and RunCheckpoints(tmp_path / "new" / "deep").make_draft(1) == draft


def test_a_checkpoint_says_all_that_it_holds_and_notices_what_is_lost_beside_the_models(tmp_path: Path) -> None:
    store = RunCheckpoints(tmp_path)
    save(store, 4, "b", "a", "c")
    (store.draft(4) / "samples.pt").write_text("drawn")
    given = {"x": {"y": [1, 2.5, None, True]}}
    made = store.commit(4, given)
    assert (made.models, made.path, made.state) == (("a", "b", "c"), tmp_path / "step-00000004", given)
    assert made.model("b") == tmp_path / "step-00000004" / "b"
    assert models_among(["a/manifest.json", "samples.pt", "manifest.json.bak", "z/manifest.json"]) == ("a", "z")
    (tmp_path / "step-00000004" / "samples.pt").write_text("DRAWN")
    with pytest.raises(CheckpointError, match=r"is damaged, samples\.pt: it has other bytes .*; remove the directory"):
        store.latest()
    (tmp_path / "step-00000004" / "samples.pt").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged, samples\.pt: it is missing") as raised:
        store.latest()
    assert raised.value.details == {"path": f"{tmp_path}/step-00000004", "name": "samples.pt"}
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        CheckpointError, match=r"empty has no run\.json, so it is no checkpoint of a run; give a step-\.\.\."
    ):
        read_run_checkpoint(tmp_path / "empty")


def test_a_state_with_one_part_that_json_changes_names_that_part(tmp_path: Path) -> None:
    store = RunCheckpoints(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match=r"would not be read back as it is: second=\(1,\); use JSON: lists"):
        store.commit(1, {"first": [1], "second": (1,), "third": {2: 3}})
    assert store.commit(1, {"first": [1], "fine": {"2": 3}}).state == {"first": [1], "fine": {"2": 3}}


def test_a_run_may_save_what_it_begins_with(tmp_path: Path) -> None:
    store = committed(tmp_path, 0)
    assert store.steps() == [0] and latest(store).step == 0
    with pytest.raises(CheckpointError, match="has a checkpoint of step 0, so one of step 0 would not be its newest"):
        store.draft(0)
    assert store.draft(1).name == ".step-00000001.incomplete"
    nothing = RunCheckpoints(tmp_path / "none")
    assert nothing.latest() is None and nothing.newest_whole() == (None, {})
