"""Checkpoints of a run: the newest committed one is found whatever happened, and nothing else is taken for one."""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
from pathlib import Path

import pytest

from actors.folder.checkpoints import RunCheckpoint, RunCheckpoints, read_run_checkpoint
from rl_backend.contracts import CheckpointError, ConfigError, RunFolderError
from tests.support.kills import killed_at


def save(checkpoints: RunCheckpoints, step: int, *models: str) -> None:
    """As ``save_checkpoint`` leaves the draft."""
    for name in models or ("policy", "critic"):
        directory = checkpoints.draft(step) / name
        directory.mkdir(parents=True)
        (directory / "weights").write_text(f"{name} after {step}")
        (directory / "manifest.json").write_text(f'{{"step": {step}}}')


def committed(root: Path, *steps: int, keep_last: int | None = None) -> RunCheckpoints:
    checkpoints = RunCheckpoints(root, keep_last)
    for step in steps:
        save(checkpoints, step)
        checkpoints.commit(step, {"step": step})
    return checkpoints


def latest(checkpoints: RunCheckpoints) -> RunCheckpoint:
    found = checkpoints.latest()
    assert found is not None
    return found


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_a_committed_checkpoint_is_found_with_its_state_and_models(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path / "run")
    assert checkpoints.latest() is None and checkpoints.steps() == []
    state = {"batches": 7, "ratio": 0.1, "names": ["a", None], "digest": "", "nested": {"text": "ü"}}
    save(checkpoints, 10)
    (checkpoints.draft(10) / "samples.pt").write_bytes(b"drawn")
    made = checkpoints.commit(10, state)
    found = latest(RunCheckpoints(tmp_path / "run"))
    assert found == made
    assert (found.step, found.state, found.models) == (10, state, ("critic", "policy"))
    assert (found.model("policy") / "weights").read_text() == "policy after 10"
    assert names(tmp_path / "run") == ["latest", "step-00000010"]
    assert (tmp_path / "run" / "latest").readlink() == Path("step-00000010")
    assert read_run_checkpoint(tmp_path / "run" / "latest") == found


def test_the_last_checkpoints_are_kept_and_the_newest_is_the_one_of_the_most_steps(tmp_path: Path) -> None:
    checkpoints = committed(tmp_path, 2, 4, 99_999_999, 100_000_000, keep_last=2)
    assert checkpoints.steps() == [99_999_999, 100_000_000]
    assert latest(checkpoints).step == 100_000_000
    assert names(tmp_path) == ["latest", "step-100000000", "step-99999999"]


def test_what_lies_beside_the_models_is_on_the_disk_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    save(checkpoints, 2)
    (checkpoints.draft(2) / "samples.pt").write_bytes(b"drawn")
    flushed, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    checkpoints.commit(2, {})
    draft = ".step-00000002.incomplete"
    assert flushed[:4] == [f"{draft}/samples.pt", f"{draft}/run.json", draft, "."]


@pytest.mark.shows(
    "resume: killed at every file system event of a commit, a run finds the old checkpoint or the new one, whole"
)
def test_a_process_killed_anywhere_in_a_commit_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    start = tmp_path / "start"
    save(committed(start, 2, 4, keep_last=2), 6)
    found: list[int] = []
    event, went_on = 0, True
    while went_on:
        root = tmp_path / f"killed-{event}"
        shutil.copytree(start, root, symlinks=True)
        checkpoints = RunCheckpoints(root, keep_last=2)
        went_on = killed_at(event, str(root), lambda store=checkpoints: store.commit(6, {"step": 6}))
        newest = latest(checkpoints)
        assert (root / "latest").is_dir(), "it points to nothing"
        assert newest.state == {"step": newest.step}
        assert (newest.model("critic") / "weights").read_text() == f"critic after {newest.step}"
        found.append(newest.step)
        checkpoints.clean_up()
        kept = checkpoints.steps()
        assert kept == ([2, 4] if newest.step == 4 else [4, 6])
        assert names(root) == ["latest", *(f"step-{step:08d}" for step in kept)]
        assert read_run_checkpoint(root / "latest") == newest
        event += 1
    assert found == sorted(found) and set(found) == {4, 6}
    assert found.count(4) >= 4 and found.count(6) >= 15


def test_a_save_that_did_not_finish_is_no_checkpoint_and_is_removed_by_the_next_run(tmp_path: Path) -> None:
    checkpoints = committed(tmp_path, 2)
    save(checkpoints, 4, "policy")
    assert latest(checkpoints).step == 2
    checkpoints.clean_up()
    assert names(tmp_path) == ["latest", "step-00000002"]
    RunCheckpoints(tmp_path / "nothing").clean_up()


def test_a_draft_that_cannot_be_removed_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = committed(tmp_path, 2)
    save(checkpoints, 4, "policy")

    def busy(directory: Path) -> None:
        raise OSError(errno.EBUSY, "a file is still open", str(directory))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        checkpoints.clean_up()
    assert "could not be removed" in caplog.text and not checkpoints.draft(4).exists()
    save(checkpoints, 4)
    checkpoints.commit(4, {})
    assert len([name for name in names(tmp_path) if name.startswith(".step-00000004.removed-")]) == 1
    checkpoints.clean_up()
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000004"]


def test_a_draft_that_cannot_be_renamed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = committed(tmp_path, 2)
    save(checkpoints, 4, "policy")

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "not allowed", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    for remove in (checkpoints.clean_up, lambda: checkpoints.discard(4)):
        with pytest.raises(
            CheckpointError, match=r"step-00000004\.incomplete, which was left unfinished, cannot be renamed"
        ):
            remove()


def test_a_step_of_which_one_save_failed_is_saved_again_after_its_draft_is_discarded(tmp_path: Path) -> None:
    checkpoints = committed(tmp_path, 2)
    save(checkpoints, 4, "policy")
    checkpoints.discard(4)
    checkpoints.discard(4)
    assert names(tmp_path) == ["latest", "step-00000002"]
    save(checkpoints, 4)
    assert checkpoints.commit(4, {}).models == ("critic", "policy")
    with pytest.raises(CheckpointError, match="has a checkpoint of step 4"):
        checkpoints.discard(4)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "run.json",
            lambda file: file.write_text(file.read_text().replace('"step": 4', '"step": 5')),
            "run.json is damaged",
        ),
        ("run.json", lambda file: file.write_text(file.read_text()[:-9]), "run.json is damaged"),
        ("run.json", Path.unlink, "has no run.json, so it is no checkpoint of a run"),
        (
            "policy/manifest.json",
            lambda file: file.write_text('{"step": 5}'),
            "damaged, policy/manifest.json: it has other bytes",
        ),
        ("policy/manifest.json", Path.unlink, "damaged, policy/manifest.json: it is missing"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_no_earlier_one_is_taken_in_its_place(
    tmp_path: Path, name: str, damage: object, message: str
) -> None:
    checkpoints = committed(tmp_path, 2, 4)
    damage(tmp_path / "step-00000004" / name)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        checkpoints.latest()
    shutil.rmtree(tmp_path / "step-00000004")
    assert latest(checkpoints).step == 2


def test_a_process_without_file_descriptors_says_what_it_could_not_do(tmp_path: Path) -> None:
    checkpoints = committed(tmp_path, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(RunFolderError, match="Too many open files"):
            checkpoints.draft(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_not_complete_is_not_committed(tmp_path: Path) -> None:
    checkpoints = committed(tmp_path, 2)
    with pytest.raises(CheckpointError, match="no model has been saved"):
        checkpoints.commit(4, {})
    save(checkpoints, 4)
    for state in ({"steps": (1, 2)}, {"loss": math.nan}, {"names": {1: "a"}}, {"path": tmp_path}):
        with pytest.raises(CheckpointError, match="would not be read back as it is"):
            checkpoints.commit(4, state)
    pending = checkpoints.draft(4) / ".reference.incomplete-0a"
    pending.mkdir()
    with pytest.raises(CheckpointError, match=r"\.reference.* is not what save_checkpoint leaves"):
        checkpoints.commit(4, {})
    pending.rename(checkpoints.draft(4) / "reference")
    with pytest.raises(CheckpointError, match=r"/reference is not what save_checkpoint leaves .*, without hf"):
        checkpoints.commit(4, {})
    assert checkpoints.steps() == [2]


def test_wrong_directories_and_options_are_refused_with_what_to_do(tmp_path: Path) -> None:
    committed(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"has no run\.json, so it is no checkpoint"):
        read_run_checkpoint(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError, match=r"it is one model's; give .*step-00000002"):
        read_run_checkpoint(tmp_path / "step-00000002" / "policy")
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="has a checkpoint of step 2, so one of step"):
            RunCheckpoints(tmp_path).draft(step)
    with pytest.raises(ConfigError, match=r"RunCheckpoints\.keep_last=0: expected at least 1"):
        RunCheckpoints(tmp_path, keep_last=0)
