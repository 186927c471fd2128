"""The lock of a run's folder, and folders that cannot be written to."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.folder import lock as lock_module
from actors.folder.lock import (
    RunLock,
    cannot_write,
    free_disk,
    require_writable,
    usable_run_dir,
    without_new_folders,
    written_to,
)
from rl_backend.contracts import ConfigError, RunFolderError


@pytest.fixture(autouse=True)
def tried_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_TRY_SECONDS", 0.1)


def test_the_holder_of_a_folder_is_named_and_the_last_one_only(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / ".lock").write_text("a much longer line of a process before, which must be gone\n")
    with RunLock(str(folder)) as lock:
        me = f"process {os.getpid()} on {socket.gethostname()}"
        assert (folder / ".lock").read_text() == f"{me}\n"
        began = time.monotonic()
        with pytest.raises(ConfigError) as refused:
            RunLock(folder)
        assert 0.1 <= time.monotonic() - began < 5
        assert str(refused.value) == (
            f"run_dir='{folder}': is in use by a run that is still alive ({me}); wait for its end or choose another"
        )
        assert (folder / ".lock").read_text() == f"{me}\n", "who is refused changes nothing"
        assert lock is not None
    RunLock(folder).release()


def test_a_holder_that_has_not_signed_is_another_process(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"still alive \(another process\)"):
            RunLock(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    with pytest.warns(UserWarning, match=rf"{tmp_path} cannot be locked \(.*\): let no second run write to it"):
        RunLock(tmp_path).release()
    assert (tmp_path / ".lock").read_text().startswith("process ")


def refusing(number: int) -> Any:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("call", ["flock", "fsync"])
def test_a_lock_that_fails_otherwise_is_an_error_and_leaves_no_open_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(fcntl if call == "flock" else os, call, refusing(errno.EIO))
    with (
        warnings.catch_warnings(action="error"),
        pytest.raises(ConfigError, match=r"run_dir='\S+': cannot be written: .*Input"),
    ):
        RunLock(tmp_path)
    monkeypatch.undo()
    RunLock(tmp_path).release()


def test_only_errors_of_the_file_system_are_said_of_a_folder(tmp_path: Path) -> None:
    def raises(context: Any, error: BaseException) -> None:
        with context:
            raise error

    with pytest.raises(
        ConfigError, match=r"^mine='x/y': cannot be written: \[Errno 28\] full; make room, or choose a folder"
    ):
        raises(usable_run_dir("x/y", "mine"), OSError(28, "full"))
    with pytest.raises(ConfigError, match=r"^run_dir='x': "):
        raises(usable_run_dir(Path("x")), FileExistsError(17, "there"))
    with pytest.raises(RunFolderError) as lost:
        raises(written_to(tmp_path), OSError(28, "full"))
    assert str(lost.value) == cannot_write(tmp_path, "[Errno 28] full")
    assert cannot_write(tmp_path, "x") == (
        f"{tmp_path} cannot be written: x; make room, then continue from its newest checkpoint with resume=auto"
    )
    assert lost.value.details == {"path": str(tmp_path), "errno": 28}
    for context in (usable_run_dir("x"), written_to(tmp_path)):
        with pytest.raises(ValueError, match="mine"):
            raises(context, ValueError("mine"))


def test_a_folder_is_tried_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("there/new/deep", "there", "other"):
        require_writable(tmp_path / name, "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^out='\S+/file/new': cannot be written"):
        require_writable(str(tmp_path / "file" / "new"), "out")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "there"]


def test_folders_that_were_made_meanwhile_go_also_after_an_error(tmp_path: Path) -> None:
    def fails() -> None:
        with without_new_folders(tmp_path / "a" / "b" / "c"):
            (tmp_path / "a" / "b").mkdir(parents=True)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()
    assert tmp_path.is_dir() and list(tmp_path.iterdir()) == []


def test_free_disk_is_that_of_the_folder_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Any:
        asked.append(folder)
        if folder.name == "gone":
            raise FileNotFoundError(2, "gone")
        return SimpleNamespace(total=9 << 40, used=1 << 40, free=3 << 29)

    monkeypatch.setattr("actors.folder.lock.shutil.disk_usage", usage)
    assert free_disk(tmp_path) == {"free_disk_gib": 1.5} and free_disk(tmp_path / "gone") == {}
    assert asked == [tmp_path, tmp_path / "gone"]
