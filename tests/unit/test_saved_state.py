"""What a save writes is the state of its moment, is on the disk, and comes back into every stage."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from rl_backend.runtime import checkpoint_writer
from tests.support.native import assert_equal_tensors, open_runtime, optimizer_state, train, weights


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, write = threading.Event(), checkpoint_writer.write_training_state

    def held_back(*args: Any) -> None:
        assert may_write.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_writer, "write_training_state", held_back)
    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 1)
        saved = {**weights(handle), **optimizer_state(handle)}
        runtime.save_checkpoint(handle, tmp_path / "saved", asynchronous=True)
        train(runtime, handle, 1, first_seed=1)
        assert any(not (saved[name] == value).all() for name, value in weights(handle).items())
        may_write.set()
        runtime.wait_for_checkpoint(handle)
        runtime.load_checkpoint(handle, tmp_path / "saved")
        assert_equal_tensors({**weights(handle), **optimizer_state(handle)}, saved)


def test_every_file_of_a_checkpoint_is_on_the_disk_before_it_gets_its_name(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[str] = set()
    flush, rename = os.fsync, Path.rename
    on_disk_at_rename: list[set[str]] = []

    def fsync(descriptor: int) -> None:
        flush(descriptor)
        flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.removesuffix(".tmp"))

    def renamed(path: Path, target: Path) -> Path:
        if target == tmp_path / "saved":
            on_disk_at_rename.append(set(flushed))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    with open_runtime(tied_model) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "saved")
    (before,) = on_disk_at_rename
    names = {entry.name for entry in (tmp_path / "saved").iterdir()}
    assert len(names) >= 3
    assert names - before == set()


def test_a_tied_head_in_a_stage_of_its_own_is_loaded_with_its_embeddings(tied_model: Path, tmp_path: Path) -> None:
    stages = {"parallel": {"vpp": 2}, "pipeline_schedule": "zbv"}
    with open_runtime(tied_model, **stages) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        runtime.save_checkpoint(handle, tmp_path / "saved")
        expected = {**weights(handle), **optimizer_state(handle)}
        fresh = runtime.build_model(name="fresh")
        assert fresh.stage_copies
        runtime.load_checkpoint(fresh, tmp_path / "saved")
        assert_equal_tensors({**weights(fresh), **optimizer_state(fresh)}, expected)
        assert train(runtime, fresh, 1, first_seed=2) == train(runtime, handle, 1, first_seed=2)
