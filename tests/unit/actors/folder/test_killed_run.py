"""A run that was killed cannot say so: its watcher does, and who reads its folder finds out."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.cluster.processes import start_time
from actors.folder.folder import RunFolder
from actors.folder.lock import RunLock
from actors.folder.resume import RunStart
from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.lab.report.page import write_report
from rl_backend.lab.report.run_data import read_run
from tests.support.clusters import ROOT
from tests.support.page import read_page

SECONDS = 60.0
RUNS = """
import os, signal, sys, time
from actors.folder.folder import RunFolder
from rl_backend.contracts import BaseConfig

class Options(BaseConfig):
    steps: int = 3

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
for line in sys.stdin:
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        with RunFolder(line.rstrip(), Options()) as folder:
            folder.log(1, {"reward": 0.5})
            print(os.getpid(), flush=True)
            time.sleep(600)
"""
"""Forks a run into each folder that it reads, when it has imported what they need once."""


@pytest.fixture(scope="module")
def runs() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RUNS], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def going(runs: subprocess.Popen[str], tmp_path: Path) -> Iterator[psutil.Process]:
    """A run in ``tmp_path`` that has logged a step and goes on."""
    assert runs.stdin is not None and runs.stdout is not None
    runs.stdin.write(f"{tmp_path}\n")
    runs.stdin.flush()
    process = psutil.Process(int(runs.stdout.readline()))
    yield process
    with suppress(psutil.NoSuchProcess):
        process.kill()


def shown_state(folder: Path) -> str:
    write_report(folder)
    (tile,) = (
        tile for tile in read_page(folder / "report.html").all("div", class_="tile") if tile.one("small").text == "state"
    )
    return tile.one("b").text


def watchers(folder: Path) -> list[psutil.Process]:
    """Processes that watch over a run in ``folder``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if "watcher.py" in " ".join(process.cmdline()) and str(folder) in process.cmdline():
                found.append(process)
    return found


def ignored(pid: int) -> int:
    """Signals that a process ignores, a bit for each."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigIgn")), 16)


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.shows("reading a run: run.json and the report say that a killed run was killed")
def test_a_run_that_was_killed_is_said_to_be(going: psutil.Process, tmp_path: Path) -> None:
    assert shown_state(tmp_path) == "running"
    before = facts(tmp_path)
    assert (before["state"], before["ended"]) == ("running", None)
    (watcher,) = watchers(tmp_path)
    assert watcher.memory_info().rss < 15 << 20
    assert watcher.cpu_times().user < 1.0
    os.killpg(going.pid, signal.SIGKILL)  # all of its group
    going.wait()
    wait_until(lambda: facts(tmp_path)["state"] == "killed")
    after = facts(tmp_path)
    assert after["error"] == "the process ended without a word: kill -9, out of memory, or a crash"
    assert after["ended"] >= after["started"] == before["started"]
    assert shown_state(tmp_path) == "killed"
    wait_until(lambda: not watchers(tmp_path))
    with RunLock(tmp_path):
        pass


LEAVES = """
import os, signal, subprocess, sys, time
from actors.cluster.processes import driver_mark
from actors.folder.folder import RunFolder
from actors.wire.segment import SharedSegment
from rl_backend.contracts import BaseConfig

ours = {**os.environ, "RL_BACKEND_DRIVER": driver_mark()}
started = [subprocess.Popen(["sleep", "600"], env=env) for env in (ours, None)]
os.kill(started[0].pid, signal.SIGSTOP)
segment = SharedSegment(1000)
with RunFolder(sys.argv[1], BaseConfig()):
    print(*(each.pid for each in started), segment.path, flush=True)
    time.sleep(600)
"""


@pytest.mark.shows(
    "failures: when driver and raylet are killed together nothing is left after 30 s: a process that is stopped is ended, "
    "and shared memory is removed"
)
def test_what_a_killed_run_has_started_through_ray_is_ended_and_its_memory_removed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        stopped, other, segment = process.stdout.readline().split()
        try:
            assert start_time(int(stopped)) and Path(segment).exists()
            process.kill()
            process.wait()
            began = time.monotonic()
            wait_until(lambda: not start_time(int(stopped)) and not Path(segment).exists())
            assert time.monotonic() - began < 30
            assert start_time(int(other)), "a program of the user's is not the run's to end"
            wait_until(lambda: not watchers(tmp_path))
        finally:
            for pid in (stopped, other):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


def test_until_the_watcher_has_written_or_without_it_readers_find_out(going: psutil.Process, tmp_path: Path) -> None:
    (watcher,) = watchers(tmp_path)
    watcher.kill()
    going.kill()
    going.wait()
    assert facts(tmp_path)["state"] == "running"
    assert shown_state(tmp_path) == "killed"
    run = read_run(tmp_path).run
    assert run["ended"] >= run["started"]


def test_a_run_that_another_process_has_taken_up_is_left_alone(going: psutil.Process, tmp_path: Path) -> None:
    (watcher,) = watchers(tmp_path)
    watcher.suspend()
    going.kill()
    going.wait()
    with RunFolder(tmp_path, BaseConfig(), start=RunStart(replaces=True)):
        watcher.resume()
        wait_until(lambda: watcher not in watchers(tmp_path))
        assert facts(tmp_path)["state"] == "running"
        assert len(watchers(tmp_path)) == 1
    assert facts(tmp_path)["state"] == "finished"
    wait_until(lambda: not watchers(tmp_path))
    assert facts(tmp_path)["state"] == "finished"


def test_a_watcher_waits_for_who_holds_the_folder_and_ignores_signals(going: psutil.Process, tmp_path: Path) -> None:
    (watcher,) = watchers(tmp_path)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    wait_until(lambda: all(ignored(watcher.pid) >> (number - 1) & 1 for number in numbers))  # it has begun
    for number in numbers:
        watcher.send_signal(number)
    watcher.suspend()
    going.kill()
    going.wait()
    with RunLock(tmp_path):  # a run that begins, and has not written its first state
        watcher.resume()
        time.sleep(0.5)
        assert facts(tmp_path)["state"] == "running"
    wait_until(lambda: facts(tmp_path)["state"] == "killed")


def test_a_run_without_a_lock_is_taken_at_its_word(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"state": "running", "started": "2026-01-01T10:00:00+00:00"}))
    assert read_run(tmp_path).run["state"] == "running"
    assert not (tmp_path / ".lock").exists()


def test_a_run_begins_though_someone_looks_at_its_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        pass
    with (tmp_path / ".lock").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
        with RunLock(tmp_path), pytest.raises(ConfigError, match="is in use by a run that is still alive"):
            RunLock(tmp_path)
