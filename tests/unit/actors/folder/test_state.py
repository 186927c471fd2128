"""``run.json``: what it says, its spare room, and who may write it last."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.processes import driver_mark
from actors.folder import state as state_module
from actors.folder import watcher
from actors.folder.lock import RunLock
from actors.folder.state import RunState, RunWatch, read_object


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def open_files() -> set[str]:
    gc.collect()  # what other tests have left open
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this look
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return {f"{name} {target}" for name, target in found.items() if target.startswith("pipe:")}


def test_states_replace_one_another_and_the_last_frees_its_room(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    assert not state.running
    first = {"state": "running", "error": None, "padding": "x" * 5000}
    state.write(first, last=False)
    size = (tmp_path / "run.json").stat().st_size
    assert state.running and written(tmp_path) == first
    assert (tmp_path / ".run.json.spare").stat().st_size == size + (64 << 10)
    blocks = (tmp_path / ".run.json.spare").stat().st_ino
    state.write({"state": "failed", "error": "e" * 8000}, last=True)
    assert written(tmp_path) == {"state": "failed", "error": "e" * 8000} and not state.running
    assert (tmp_path / "run.json").stat().st_ino == blocks, "the room that was taken with the first state"
    assert not (tmp_path / ".run.json.spare").exists()


def test_a_long_error_is_cut_and_the_facts_that_were_given_stay(tmp_path: Path) -> None:
    facts = {"state": "failed", "error": "e" * 8001, "more": 1}
    RunState(tmp_path).write(facts, last=True)
    assert written(tmp_path) == {"state": "failed", "error": f"{'e' * 8000}...", "more": 1}
    assert len(facts["error"]) == 8001  # type: ignore[arg-type]
    RunState(tmp_path).write({"state": "finished"}, last=True)
    assert (tmp_path / "run.json").read_text() == '{\n  "state": "finished"\n}\n'


def test_a_state_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, bool]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.append((os.fstat(descriptor).st_size, (tmp_path / "run.json").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    RunState(tmp_path).write({"state": "finished"}, last=True)
    assert flushed == [(len('{\n  "state": "finished"\n}\n'), False)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is a list, not a JSON object"),
        ("null", "is a NoneType, not a JSON object"),
        ("[" * 100_000, "maximum recursion depth"),
        ("{", "Expecting property name"),
    ],
)
def test_only_objects_are_read(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x.json"
    with pytest.raises(FileNotFoundError):
        read_object(file)
    file.write_text(text)
    with pytest.raises((ValueError, RecursionError), match=message):
        read_object(file)
    file.write_text('{"a": {"b": [1]}}')
    assert read_object(file) == {"a": {"b": [1]}}


def running(folder: Path, process: str = "1 on here, ab", **more: Any) -> None:
    (folder / ".lock").touch()
    (folder / "run.json").write_text(json.dumps({"state": "running", "process": process, "started": "then", **more}))


def test_a_run_is_said_to_be_killed_only_while_it_is_the_one_that_runs(tmp_path: Path) -> None:
    me = "1 on here, ab"
    for facts in ({"state": "finished"}, {"process": "2 on here, cd"}):
        running(tmp_path, me)
        running(tmp_path, **{"process": me, **facts})
        before = (tmp_path / "run.json").read_text()
        assert not watcher.is_running(str(tmp_path), me) and watcher._say_killed(str(tmp_path), me, "now")
        assert (tmp_path / "run.json").read_text() == before
    for text in ("[]", "{", "7"):
        (tmp_path / "run.json").write_text(text)
        assert not watcher.is_running(str(tmp_path), me)
    running(tmp_path, me)
    assert watcher.is_running(str(tmp_path), me)
    with RunLock(tmp_path):
        assert not watcher._say_killed(str(tmp_path), me, "now")
        assert written(tmp_path)["state"] == "running"
    (tmp_path / ".run.json.spare").write_text("x" * 5000)
    assert watcher._say_killed(str(tmp_path), me, "now")
    assert written(tmp_path) == {
        "state": "killed",
        "process": me,
        "started": "then",
        "error": "the process ended without a word: kill -9, out of memory, or a crash",
        "ended": "now",
    }
    assert not (tmp_path / ".run.json.spare").exists()


def test_a_watcher_gives_up_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_TRY_SECONDS", 0.02), ("_GIVE_UP_SECONDS", 0.1)):
        monkeypatch.setattr(watcher, name, seconds)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "read", lambda *_: b"")
    drivers: list[str] = []
    monkeypatch.setattr(watcher, "end_what_is_left", drivers.append)
    running(tmp_path, "me")
    with RunLock(tmp_path):
        watcher.watch(str(tmp_path), "me", "7-9")
        assert written(tmp_path)["state"] == "running"
    watcher.watch(str(tmp_path), "me", "7-9")
    assert drivers == ["7-9"] * 2
    assert written(tmp_path)["state"] == "killed"
    assert written(tmp_path)["ended"].endswith("+00:00") and len(written(tmp_path)["ended"]) == 25


def test_a_watch_that_cannot_be_started_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(11, "no more processes")

    monkeypatch.setattr(subprocess, "run", refuse)
    before = open_files()
    watch = RunWatch(tmp_path)
    with pytest.warns(UserWarning, match=rf"{tmp_path}/run\.json will say running if this run is killed: .*no more proc"):
        watch.start()
    assert not open_files() - before
    watch.close()
    watch.close()


def test_a_watch_is_told_of_the_folder_and_its_process_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **options: asked.append((command, options)))
    before = open_files()
    first, second = RunWatch(tmp_path), RunWatch(tmp_path)
    assert first.process != second.process and first.process.startswith(f"{os.getpid()} on ")
    first.start()
    assert len(open_files() - before) == 1
    ((command, options),) = asked
    assert command == [sys.executable, "-I", "-S", watcher.__file__, str(tmp_path), first.process, driver_mark()]
    assert (options["start_new_session"], options["check"], options["cwd"]) == (True, True, "/")
    second.start()
    state_module._close_all()
    assert not open_files() - before, "a forked child holds no pipe"
    first.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_TRY_SECONDS", 0.01), ("_GRACE_SECONDS", 0.1), ("_END_SECONDS", 20.0)):
        monkeypatch.setattr(watcher, name, seconds)


def test_memory_of_processes_that_have_ended_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: None
) -> None:
    monkeypatch.setattr(watcher, "_SHARED_MEMORY", str(tmp_path))
    here, me = os.stat("/proc/self/ns/pid").st_ino, f"{os.getpid()}-{watcher._start_of(str(os.getpid()))}"
    stays = [
        f"rl_backend_weights-{here}-{me}-0",
        f"rl_backend_weights-{here + 1}-4194303-1-0",
        f"rl_backend_weights-{here}-4194303-1",
        f"rl_backend_weights-{here}-4194303-1-0-9",
        f"rl_backend_other-{here}-4194303-1-0",
        "sem.mine",
    ]
    goes = [f"rl_backend_weights-{here}-4194303-1-0", f"rl_backend_weights-{here}-{os.getpid()}-1-0"]
    for name in stays + goes:
        (tmp_path / name).touch()
    watcher.end_what_is_left(me)
    assert len(list(tmp_path.iterdir())) == 8, "the driver lives"
    watcher.end_what_is_left("4194303-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stays)
    monkeypatch.setattr(watcher, "_SHARED_MEMORY", str(tmp_path / "none"))
    watcher.end_what_is_left("4194303-1")


def test_processes_that_a_driver_started_are_ended_and_no_others(tmp_path: Path, patience: None) -> None:
    driver = "4194303-17"
    environments = [{"RL_BACKEND_DRIVER": driver}, {"RL_BACKEND_DRIVER": f"{driver}0"}, {"MY_DRIVER": driver}, {}]
    children = [subprocess.Popen(["sleep", "60"], env={**os.environ, **each}) for each in environments]
    try:
        assert watcher._started_by(driver) == [children[0].pid]
        began = time.monotonic()
        watcher.end_what_is_left(driver)
        assert children[0].wait(10) == -signal.SIGKILL and 0.1 <= time.monotonic() - began < 15
        assert all(child.poll() is None for child in children[1:])
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_process_that_has_ended_has_no_start_though_nobody_has_waited_for_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = watcher._start_of(str(child.pid))
        assert started == driver_mark_of(child.pid) and started.isdigit()
        child.kill()
        deadline = time.monotonic() + 10
        while watcher._start_of(str(child.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watcher._start_of(str(child.pid)) == "" and Path(f"/proc/{child.pid}").exists()
    assert watcher._start_of(str(child.pid)) == watcher._start_of("4194303") == ""


def driver_mark_of(pid: int) -> str:
    """The start of a process, by the fields behind its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
