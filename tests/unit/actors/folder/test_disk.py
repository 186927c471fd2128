"""A run whose folder cannot be written to says so, by name, and never hides the error that ended it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.folder.checkpoints import save_drawn
from actors.folder.folder import RunFolder
from actors.folder.lock import RunLock
from actors.folder.state import RunState
from actors.run import run as run_module
from examples import grpo, ppo, sft
from examples.demo.task import write_task
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import BaseConfig, CheckpointError, ConfigError, RunFolderError
from rl_backend.contracts.lora import LoRAConfig
from tests.support.matrix import sampled
from tests.support.native import open_runtime

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore:.*report.html was not written:UserWarning"
)


class Options(BaseConfig):
    steps: int = 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {mounted.stderr.decode()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass


def state(path: Path) -> tuple[str, str | None]:
    facts = json.loads((path / "run.json").read_text())
    return facts["state"], facts["error"]


LINES = [{"prompt": "p" * 100_000, "response": "", "reward": 0.0}]
CURVES = {f"c{number}": 0.5 for number in range(100)}
"""Metrics whose points of TensorBoard take a page of the disk and more, where their line of ``metrics.jsonl`` takes less."""


def run_out_of_space(disk: Path, then: Callable[[RunFolder], Any]) -> None:
    with RunFolder(disk / "run", Options(), report_seconds=0) as folder:
        folder.log(1, {"reward": 0.5})
        fill(disk)
        then(folder)


def lose_curves(folder: RunFolder) -> None:
    """TensorBoard writes in a thread of its own, so that this raises now, or the folder at its end."""
    with suppress(RunFolderError):
        folder.log(2, CURVES)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: folder.log_samples(1, LINES),
        lambda folder: folder.log_held_out(1, LINES),
        lambda folder: folder.log(2, {str(number): 0.5 for number in range(10_000)}),
        lambda folder: folder.write_summary({"notes": "n" * 10_000}),
    ],
    ids=["samples", "held_out", "metrics", "summary"],
)
def test_a_disk_that_fills_up_ends_the_run_with_a_name_and_a_last_state(small_disk: Path, write: Any) -> None:
    with pytest.raises(RunFolderError, match=r"run cannot be written: .*No space left on device.*resume=auto"):
        run_out_of_space(small_disk, write)
    ended, error = state(small_disk / "run")
    assert ended == "failed" and error is not None and error.startswith("RunFolderError") and "No space left" in error


def test_a_full_disk_does_not_hide_the_error_that_ends_a_run(small_disk: Path) -> None:
    def fail(folder: RunFolder) -> None:
        lose_curves(folder)
        raise KeyError("the run's own")

    with pytest.raises(KeyError, match="the run's own") as caught:
        run_out_of_space(small_disk, fail)
    assert state(small_disk / "run") == ("failed", 'KeyError: "the run\'s own"')
    assert any("No space left on device" in note for note in caught.value.__notes__)


def test_what_is_lost_at_the_end_of_a_run_makes_it_fail(small_disk: Path) -> None:
    with pytest.raises(RunFolderError, match="No space left"):
        run_out_of_space(small_disk, lose_curves)
    assert state(small_disk / "run")[0] == "failed"


def test_an_adapter_names_a_full_disk(small_disk: Path) -> None:
    tensors = {f"base_model.model.m.lora_{part}.weight": torch.ones(2**18) for part in "AB"}
    with pytest.raises(CheckpointError, match=r"adapter.*could not be written: .*No space left on device"):
        write_peft_directory(small_disk / "adapter", tensors.items(), LoRAConfig(), "base")
    assert not list(small_disk.iterdir())


def test_drawn_samples_name_a_full_disk(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(RunFolderError, match=r"drawn_samples\.pt cannot be written: .*No space left"):
        save_drawn([], small_disk)


@pytest.mark.parametrize("settings", [{}, {"asynchronous": True}, {"hf": True}], ids=str)
def test_a_save_names_a_full_disk_and_leaves_nothing(small_disk: Path, tied_model: Path, settings: dict[str, bool]) -> None:
    def save() -> None:
        runtime.save_checkpoint(handle, small_disk / "saved", **settings)
        runtime.wait_for_checkpoint(handle)

    with open_runtime(tied_model) as runtime:
        handle = runtime.build_model()
        (small_disk / "filler").write_bytes(bytes(700 << 10))
        with pytest.raises(CheckpointError, match=r"No space left on device") as caught:
            save()
        assert "unexpected pos" not in str(caught.value)
        assert [entry.name for entry in small_disk.iterdir()] == ["filler"]


def test_a_run_on_a_full_disk_does_not_begin(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"run_dir=.*cannot be written: .*No space left.*choose a folder"):
        RunLock(small_disk / "run")


def test_a_run_whose_folder_fills_up_while_it_is_opened_has_failed(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunState.write

    def then_fill(self: RunState, facts: dict[str, object], *, last: bool) -> None:
        write(self, facts, last=last)
        fill(small_disk)

    monkeypatch.setattr(RunState, "write", then_fill)
    with pytest.raises(ConfigError, match=r"run_dir=.*No space left"):
        RunFolder(small_disk / "run", Options(), report_seconds=0)
    assert state(small_disk / "run")[0] == "failed"


def test_a_read_only_file_system_is_refused_by_name(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match=r"run_dir=.*Read-only file system"):
        RunLock(small_disk / "run")


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_where_the_folder_should_be_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    for open_folder in (lambda: RunLock(tmp_path / name), lambda: RunFolder(tmp_path / name, Options())):
        with pytest.raises(ConfigError, match=r"run_dir=.*file.*cannot be written: .*choose a folder"):
            open_folder()


def test_a_lock_taken_before_the_folder_is_opened_is_the_folders(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        with pytest.raises(ConfigError, match="in use"):
            RunLock(tmp_path)
        with RunFolder(tmp_path, Options(), report_seconds=0, lock=lock), pytest.raises(ConfigError, match="in use"):
            RunLock(tmp_path)
    RunLock(tmp_path).release()


def fail_at_length(path: Path) -> None:
    with RunFolder(path, Options(), report_seconds=0):
        raise ValueError("z\N{SNOWMAN}" * 100_000)


def test_a_very_long_error_fits_in_the_last_state(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="z"):
        fail_at_length(tmp_path)
    assert state(tmp_path)[0] == "failed" and os.path.getsize(tmp_path / "run.json") < 64 << 10
    assert not (tmp_path / ".run.json.spare").exists()


@pytest.mark.parametrize(
    ("train", "in_use"),
    sampled(
        [(train, in_use) for train in (grpo.train, ppo.train, sft.train) for in_use in (True, False)],
        *((grpo.train, True), (sft.train, False)),
    ),
)
def test_the_folder_is_tried_and_locked_before_anything_is_started(
    tmp_path: Path, train: Any, in_use: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(run_module, "open_session", lambda config, phases: started.append(1) or nullcontext())
    write_task(tmp_path / "task", seed=0)
    files = {"model": str(tmp_path / "task/model"), "dataset": str(tmp_path / "task/train.jsonl")}
    kind = {grpo.train: grpo.GRPOConfig, ppo.train: ppo.PPOConfig, sft.train: sft.SFTConfig}[train]
    rewards = {} if train is sft.train else {"reward": "examples.demo.task:compute_score"}
    config = kind(**files, **rewards, run_dir=str(tmp_path / "run"), dtype="float32")
    if in_use:
        with RunLock(config.run_dir), pytest.raises(ConfigError, match=r"run_dir=.*is in use"):
            train(config)
    else:
        (tmp_path / "run").write_text("")
        with pytest.raises(ConfigError, match=r"run_dir=.*cannot be written"):
            train(config)
    assert not started
