"""What is on the disk when a save is complete: the state of the moment of the save, and flushed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.folder.checkpoints import RunCheckpoints
from rl_backend.checkpoint.training_state import DigestingWriter
from rl_backend.runtime import checkpoints
from tests.support.native import assert_equal_tensors, open_runtime, optimizer_state, train, weights


def test_a_save_in_the_background_has_the_state_of_its_call_however_late_it_is_written(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), checkpoints.write_training_state

    def write_later(*args: Any) -> None:
        assert gate.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoints, "write_training_state", write_later)
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        before = {**weights(handle), **optimizer_state(handle)}
        runtime.save_checkpoint(handle, tmp_path / "saved", asynchronous=True)
        train(runtime, handle, 2, first_seed=1)
        after = {**weights(handle), **optimizer_state(handle)}
        assert any(not after[name].equal(before[name]) for name in before)
        gate.set()
        runtime.wait_for_checkpoint(handle)
        runtime.load_checkpoint(handle, tmp_path / "saved")
        assert_equal_tensors({**weights(handle), **optimizer_state(handle)}, before)


def test_a_second_save_leaves_what_the_first_is_still_writing(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), checkpoints.write_training_state

    def write_later(*args: Any) -> None:
        assert gate.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoints, "write_training_state", write_later)
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        saved = []
        opening = threading.Timer(2.0, gate.set)
        for step in range(2):
            train(runtime, handle, 1, first_seed=step)
            saved.append({**weights(handle), **optimizer_state(handle)})
            runtime.save_checkpoint(handle, tmp_path / f"saved-{step}", asynchronous=True)
            if step == 0:
                opening.start()
        runtime.wait_for_checkpoint(handle)
        for step, state in enumerate(saved):
            runtime.load_checkpoint(handle, tmp_path / f"saved-{step}")
            assert_equal_tensors({**weights(handle), **optimizer_state(handle)}, state)


class Flushes:
    """Size of each file and directory when it was flushed last, by inode, and those that had been when a name was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, int] = {}
        self.before_rename: dict[str, dict[int, int]] = {}
        flush, rename = os.fsync, os.rename

        def fsync(descriptor: int) -> None:
            flush(descriptor)
            facts = os.fstat(descriptor)
            self.sizes[facts.st_ino] = facts.st_size

        def renamed(source: Any, target: Any) -> None:
            self.before_rename[str(target)] = dict(self.sizes)
            rename(source, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", renamed)

    def not_flushed(self, path: Path) -> list[str]:
        """Files below ``path`` that had not been flushed with all of their bytes when ``path`` got its name."""
        then = self.before_rename[str(path)]
        files = [entry for entry in path.rglob("*") if entry.is_file()]
        assert files
        return [str(file) for file in files if then.get(file.stat().st_ino) != file.stat().st_size]


@pytest.mark.shows("checkpoints: every byte is flushed to the disk before a checkpoint gets its name")
@pytest.mark.parametrize("settings", [{}, {"asynchronous": True}, {"hf": True}], ids=str)
def test_every_file_is_flushed_before_the_checkpoint_gets_its_name(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    path = tmp_path / "saved"
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        flushes = Flushes(monkeypatch)
        runtime.save_checkpoint(handle, path, **settings)
        runtime.wait_for_checkpoint(handle)
    assert flushes.not_flushed(path) == []
    assert path.stat().st_ino in flushes.before_rename[str(path)]
    assert tmp_path.stat().st_ino in flushes.sizes


def test_every_file_is_flushed_before_a_run_s_checkpoint_gets_its_name(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = RunCheckpoints(tmp_path / "root")
    flushes = Flushes(monkeypatch)
    with open_runtime(tied_model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), checkpoints.draft(1) / "policy")
    (checkpoints.draft(1) / "notes.txt").write_text("mine")
    path = checkpoints.commit(1, {}).path
    assert flushes.not_flushed(path) == []
    assert checkpoints.root.stat().st_ino in flushes.sizes


def test_a_file_that_is_flushed_by_its_descriptor_has_all_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with DigestingWriter(tmp_path).fs.create_stream(path, "wb") as stream:
        stream.write(b"few bytes, which a buffer holds")
        os.fsync(stream.fileno())
        assert path.read_bytes() == b"few bytes, which a buffer holds"
