"""A run's checkpoint is committed when its last model is written, with the state of the step that was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import Sample
from actors.folder.checkpoints import StreamPosition
from actors.folder.folder import RunFolder
from actors.folder.resume import RunStart, find_start
from actors.rollout.messages import VersionSpan
from actors.run.saver import RunSaver
from actors.train.model import GroupModel
from actors.watch.metrics import Clock
from examples.sft import SFTConfig
from rl_backend.contracts import CheckpointError, ConfigError


class Waiting:
    """``wait_for_checkpoint``: called, or submitted and waited for."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.waited: list[float | None] = []

    def submit(self, handle: Any) -> Waiting:
        return self

    def result(self, timeout: float | None = None) -> None:
        self.waited.append(timeout)
        if self.group.error:
            raise self.group.error
        self.group.write()


class Group:
    """Stands for a training group: a save in the background appears when it is let."""

    def __init__(self) -> None:
        self.writing: list[Path] = []
        self.error: BaseException | None = None
        self.wait_for_checkpoint = Waiting(self)
        self.loaded: list[Path] = []
        self.bounds: list[tuple[str, str]] = []
        self.wants_boundary = self.is_steady = False

    @contextmanager
    def steady(self) -> Iterator[None]:
        assert not self.writing, "all is written, and has not moved"
        self.is_steady = True
        yield
        self.is_steady = False

    def bound(self, handle: Any, saved: Path, committed: Path) -> None:
        assert committed.is_dir() and self.is_steady
        self.bounds.append((f"{saved.parent.name}/{saved.name}", f"{committed.parent.name}/{committed.name}"))

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
    saver.commit(number, {"mine": {"step": number}})


def test_a_save_in_the_background_is_committed_after_the_step_in_which_its_last_model_is_written(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    actors, critics = Group(), Group()
    models: Any = {"actor": GroupModel(actors, None), "critic": GroupModel(critics, None)}  # type: ignore[arg-type]
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
    assert (start.step, start.progress.part("mine")) == (5, {"step": 5})
    longer = config.replace(steps=9, resume="auto")
    with RunFolder(config.run_dir, longer, start=start, report_seconds=0) as folder:
        RunSaver(longer, folder, models, start)
    assert [path.name for path in (*actors.loaded, *critics.loaded)] == ["actor", "critic"]


def test_a_group_is_told_of_every_checkpoint_and_gets_one_when_it_keeps_too_much(tmp_path: Path) -> None:
    config, group = config_of(tmp_path, async_save=False), Group()
    models: Any = {"actor": GroupModel(group, None)}  # type: ignore[arg-type]
    with (
        RunFolder(config.run_dir, config, report_seconds=0) as folder,
        RunSaver(config, folder, models, RunStart()) as saver,
    ):
        step(saver, 1)
        assert not group.bounds
        step(saver, 2)
        group.wants_boundary = True
        step(saver, 3)
        group.wants_boundary = False
    assert group.bounds == [(f".step-0000000{number}.incomplete/actor", f"step-0000000{number}/actor") for number in (2, 3)]


def test_saves_that_training_waits_for_are_committed_in_their_step_and_errors_are_raised(tmp_path: Path) -> None:
    config = config_of(tmp_path, async_save=False)
    group = Group()
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": GroupModel(group, None)}, RunStart())  # type: ignore[arg-type]
        step(saver, 2)
        assert committed(tmp_path) == ["step-00000002"]
        group.error = CheckpointError("the disk is full")
        with pytest.raises(CheckpointError, match="the disk is full"):
            step(saver, 4)
    assert committed(tmp_path) == ["step-00000002"]


def test_a_run_that_saves_no_checkpoints_leaves_those_that_there_are(tmp_path: Path) -> None:
    config = config_of(tmp_path, async_save=False, keep_checkpoints=0, steps=8)
    models: Any = {"sft": GroupModel(Group(), None)}  # type: ignore[arg-type]
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, models, RunStart())
        for number in (2, 4, 6):
            step(saver, number)
    again = config_of(tmp_path, save_every=0, steps=9, resume="auto")
    assert again.keep_checkpoints == 2
    with RunFolder(again.run_dir, again, start=(start := find_start(again)), report_seconds=0) as folder:
        RunSaver(again, folder, models, start)
    assert committed(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]


def test_a_checkpoint_whose_samples_were_not_written_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(drawn: Any, draft: Path) -> None:
        (draft / "drawn_samples.pt").write_text("x")
        raise CheckpointError("the disk is full")

    monkeypatch.setattr("actors.folder.checkpoints.save_drawn", fail)

    def work(saver: RunSaver) -> None:
        saver.save(2, Clock())
        group.write()
        saver.commit(2, {"mine": {}}, StreamPosition(3))

    config, group = config_of(tmp_path), Group()
    models: Any = {"sft": GroupModel(group, None)}  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the disk is full"):
        end_with(KeyError("not reached"), config, models, work)
    assert committed(tmp_path) == []


def test_the_driver_makes_the_directory_that_ranks_save_into(tmp_path: Path) -> None:
    there: list[bool] = []

    class Looking(Group):
        def save_checkpoint(self, handle: Any, path: Path, *, asynchronous: bool) -> None:
            there.append(path.parent.is_dir())
            super().save_checkpoint(handle, path, asynchronous=asynchronous)

    config = config_of(tmp_path)
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": GroupModel(Looking(), None)}, RunStart())  # type: ignore[arg-type]
        step(saver, 2)
        saver.finish()
    assert there == [True]


def test_a_dtype_that_the_cluster_decides_must_be_the_one_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, async_save=False)
    group = Group()
    models: Any = {"sft": GroupModel(group, None)}  # type: ignore[arg-type]
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


def end_with(error: BaseException, config: SFTConfig, models: Any, work: Callable[[RunSaver], None]) -> None:
    """A run that raises ``error`` after ``work``."""
    with (
        RunFolder(config.run_dir, config, report_seconds=0) as folder,
        RunSaver(config, folder, models, RunStart()) as saver,
    ):
        work(saver)
        raise error


@pytest.mark.parametrize("error", [ValueError("step 3 failed"), KeyboardInterrupt()])
def test_a_run_that_ends_with_an_error_commits_what_was_being_written(tmp_path: Path, error: BaseException) -> None:
    config, group = config_of(tmp_path), Group()
    with pytest.raises(type(error)) as raised:
        end_with(error, config, {"sft": GroupModel(group, None)}, lambda saver: step(saver, 2))  # type: ignore[arg-type]
    assert committed(tmp_path) == ["step-00000002"]
    assert raised.value is error and not getattr(error, "__notes__", [])
    assert all(waited is not None and 0 < waited <= 300 for waited in group.wait_for_checkpoint.waited)
    assert find_start(config.replace(resume="auto")).step == 2


@pytest.mark.parametrize(
    ("problem", "note"),
    [
        (CheckpointError("the disk is full"), "CheckpointError: the disk is full"),
        (TimeoutError("not done after 300 s"), "TimeoutError: not done after 300 s"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_that_ends_a_run_is_told_whatever_its_checkpoint_meets(
    tmp_path: Path, problem: BaseException, note: str
) -> None:
    config, group = config_of(tmp_path), Group()

    def work(saver: RunSaver) -> None:
        step(saver, 2)
        group.error = problem

    with pytest.raises(ValueError, match="step 3 failed") as raised:
        end_with(ValueError("step 3 failed"), config, {"sft": GroupModel(group, None)}, work)  # type: ignore[arg-type]
    assert raised.value.__notes__ == [f"the checkpoint of step 2 was not committed, {note}"]
    assert committed(tmp_path) == []


def test_a_run_that_is_ended_at_once_waits_for_no_save(tmp_path: Path) -> None:
    config, group = config_of(tmp_path), Group()

    def work(saver: RunSaver) -> None:
        step(saver, 2)
        saver.abandon()

    with pytest.raises(KeyboardInterrupt):
        end_with(KeyboardInterrupt(), config, {"sft": GroupModel(group, None)}, work)  # type: ignore[arg-type]
    assert group.wait_for_checkpoint.waited == [] and committed(tmp_path) == []


def test_nothing_is_committed_without_the_loops_state_or_without_one_of_the_models(tmp_path: Path) -> None:
    config, group, failed = config_of(tmp_path), Group(), Group()
    models: Any = {"actor": GroupModel(group, None), "critic": GroupModel(failed, None)}  # type: ignore[arg-type]
    for has_state in (False, True):

        def work(saver: RunSaver, has_state: bool = has_state) -> None:
            saver.save(2, Clock())
            if has_state:
                saver.commit(2, {"mine": {"step": 2}})
            group.write()
            failed.writing.clear()

        with pytest.raises(ValueError, match="the step failed") as raised:
            end_with(ValueError("the step failed"), config, models, work)
        notes = getattr(raised.value, "__notes__", [])
        assert len(notes) == has_state and all("has no critic: the save has failed" in note for note in notes)
        assert committed(tmp_path) == []


def test_samples_drawn_ahead_are_in_the_checkpoint_with_the_place_in_the_stream(tmp_path: Path) -> None:
    config, group = config_of(tmp_path, async_save=False), Group()
    drawn = [[Sample(0, 0, [5], [7], [-0.5], "stop", (VersionSpan(3, 1),), 0)]]
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": GroupModel(group, None)}, RunStart())  # type: ignore[arg-type]
        saver.save(2, Clock())
        saver.commit(2, {}, StreamPosition(4, drawn))
    assert find_start(config.replace(steps=9, resume="auto")).progress.position == StreamPosition(4, drawn)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("last", [2, 3])
def test_a_run_that_ends_early_has_a_checkpoint_of_its_last_step_when_that_is_written(
    tmp_path: Path, asynchronous: bool, last: int
) -> None:
    config, group = config_of(tmp_path, async_save=asynchronous), Group()
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": GroupModel(group, None)}, RunStart())  # type: ignore[arg-type]
        for number in range(1, last + 1):
            step(saver, number)
        path = saver.end(last, {"mine": {"step": last}})
        assert path is not None and path.name == f"step-{last:08d}" and (path / "sft" / "manifest.json").exists()
        assert saver.end(last, {"mine": {"step": last}}) == path
    start = find_start(config.replace(resume="auto"))
    assert (start.step, start.progress.part("mine")) == (last, {"step": last})


def test_without_save_every_nothing_is_saved(tmp_path: Path) -> None:
    config = config_of(tmp_path, save_every=0)
    with RunFolder(config.run_dir, config, report_seconds=0) as folder:
        saver = RunSaver(config, folder, {"sft": GroupModel(Group(), None)}, RunStart())  # type: ignore[arg-type]
        for number in range(1, 6):
            step(saver, number)
        assert saver.end(5, {}) is None
        saver.finish()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_models_of_one_group_are_committed_together_and_any_group_may_want_a_checkpoint(tmp_path: Path) -> None:
    class Once(Group):
        entered = 0

        @contextmanager
        def steady(self) -> Iterator[None]:
            assert not self.is_steady, "a group that is steady waits for itself"
            self.entered += 1
            with super().steady():
                yield

    config, shared, other = config_of(tmp_path, async_save=False), Once(), Once()
    groups = {"actor": shared, "critic": shared, "reference": other}
    models: Any = {name: GroupModel(group, None) for name, group in groups.items()}  # type: ignore[arg-type]
    with (
        RunFolder(config.run_dir, config, report_seconds=0) as folder,
        RunSaver(config, folder, models, RunStart()) as saver,
    ):
        step(saver, 2)
        assert (shared.entered, other.entered) == (1, 1)
        other.wants_boundary = True
        step(saver, 3)
    assert [saved for saved, _ in shared.bounds] == [
        f".step-0000000{number}.incomplete/{name}" for number in (2, 3) for name in ("actor", "critic")
    ]
    assert [made for _, made in other.bounds] == ["step-00000002/reference", "step-00000003/reference"]
