"""A run's checkpoint is committed when its last model is written, with the state of the step that was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from examples.common.clock import Clock
from examples.common.models import Model
from examples.common.run_folder import RunFolder
from examples.common.run_saver import RunSaver
from examples.common.run_start import RunStart, find_start
from examples.sft import SFTConfig
from rl_backend.contracts import CheckpointError, ConfigError


class Group:
    """Stands for a training group: a save in the background appears when it is let."""

    def __init__(self) -> None:
        self.writing: list[Path] = []
        self.error: CheckpointError | None = None
        self.loaded: list[Path] = []

    def save_checkpoint(self, handle: Any, path: Path, *, asynchronous: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.writing.append(path)
        if not asynchronous:
            self.write()

    def write(self) -> None:
        for path in self.writing:
            path.mkdir()
            (path / "manifest.json").write_text("{}")
        self.writing.clear()

    def checkpoint_is_pending(self, handle: Any) -> bool:
        if self.error:
            raise self.error
        return bool(self.writing)

    def wait_for_checkpoint(self, handle: Any) -> None:
        self.write()

    def load_checkpoint(self, handle: Any, path: Path) -> None:
        self.loaded.append(path)


def config_of(tmp_path: Path, **changes: Any) -> SFTConfig:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    options = {
        "model": "m",
        "dataset": str(tmp_path / "train.jsonl"),
        "run_dir": str(tmp_path / "run"),
        "steps": 5,
        "dtype": "float32",
    }
    return SFTConfig(**{**options, "save_every": 2, **changes})


def committed(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))


def step(saver: RunSaver, number: int) -> None:
    saver.save(number, Clock())
    saver.commit(number, {"mine": number})


def test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    actors, critics = Group(), Group()
    models: Any = {"actor": Model(actors, None), "critic": Model(critics, None)}  # type: ignore[arg-type]
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, models, RunStart())
        step(saver, 1)
        step(saver, 2)
        actors.write()
        step(saver, 3)
        assert committed(tmp_path) == []
        step(saver, 4)  # waits for the one before
        assert committed(tmp_path) == ["step-00000002"]
        actors.write()
        critics.write()
        step(saver, 5)
        assert committed(tmp_path) == ["step-00000002", "step-00000004"]
        saver.finish()
    assert committed(tmp_path) == ["step-00000004", "step-00000005"]
    start = find_start(config.replace(steps=9, resume="auto"))
    assert (start.step, start.state("mine")) == (5, 5)
    longer = config.replace(steps=9, resume="auto")
    with RunFolder(config.run_dir, longer, start=start, report_seconds=0) as folder:
        RunSaver(longer, folder, models, start)
    assert [path.name for path in (*actors.loaded, *critics.loaded)] == ["actor", "critic"]


def test_saves_that_training_waits_for_are_committed_in_their_step_and_errors_are_raised(tmp_path: Path) -> None:
    config = config_of(tmp_path, async_save=False)
    group = Group()
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": Model(group, None)}, RunStart())  # type: ignore[arg-type]
        step(saver, 2)
        assert committed(tmp_path) == ["step-00000002"]
        group.error = CheckpointError("the disk is full")
        with pytest.raises(CheckpointError, match="the disk is full"):
            step(saver, 4)
    assert committed(tmp_path) == ["step-00000002"]


def test_a_dtype_that_the_cluster_decides_must_be_the_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, async_save=False)
    group = Group()
    models: Any = {"sft": Model(group, None)}  # type: ignore[arg-type]
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        step(RunSaver(config, folder, models, RunStart()), 2)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8.0})
    again = config.replace(steps=9, dtype="auto", resume="auto")
    with (
        RunFolder(config.run_dir, again, start=(start := find_start(again)), report_seconds=0) as folder,
        pytest.raises(ConfigError, match=r"SFTConfig\.dtype='auto': is bfloat16 here; .* has float32"),
    ):
        RunSaver(again, folder, models, start)
    assert not group.loaded


def test_without_save_every_nothing_is_saved(tmp_path: Path) -> None:
    config = config_of(tmp_path, save_every=0)
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": Model(Group(), None)}, RunStart())  # type: ignore[arg-type]
        for number in range(1, 6):
            step(saver, number)
        saver.finish()
    assert not (tmp_path / "run" / "checkpoints").exists()
