"""The process beside a run that says so in ``run.json`` when the run is killed; ``RunWatch`` starts it.

python -I -S watcher.py FOLDER PROCESS     PROCESS: ``process`` of run.json; standard input ends with the run

It imports little, waits without polling, and has a session of its own, which Ctrl-C and signals to the run do not reach.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time

_TRY_SECONDS, _GIVE_UP_SECONDS = 0.2, 600.0


def watch(folder: str, process: str) -> None:
    """Waits for the end of standard input, then turns the state "running" of the run into "killed"."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    ended = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    # Who holds the lock reads the folder for a moment, continues the run, or is a process that the run has left.
    # A run that ended in order, or that another process continues, is left alone.
    while is_running(folder, process) and not _say_killed(folder, process, ended) and time.monotonic() < deadline:
        time.sleep(_TRY_SECONDS)


def is_running(folder: str, process: str) -> bool:
    facts = _read(folder)
    return facts.get("state") == "running" and facts.get("process") == process


def _say_killed(folder: str, process: str, ended: str) -> bool:
    with open(os.path.join(folder, ".lock"), "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        if is_running(folder, process):
            error = "the process ended without a word: kill -9, out of memory, or a crash"
            _write(folder, {**_read(folder), "state": "killed", "error": error, "ended": ended})
    return True


def _read(folder: str) -> dict[str, object]:
    try:
        with open(os.path.join(folder, "run.json"), encoding="utf-8") as file:
            facts = json.load(file)
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _write(folder: str, facts: dict[str, object]) -> None:
    # The space that RunState has reserved for the last state: the disk may be full.
    spare = os.path.join(folder, ".run.json.spare")
    with open(spare, "r+b" if os.path.exists(spare) else "w+b") as file:
        file.write((json.dumps(facts, indent=2) + "\n").encode())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    os.replace(spare, os.path.join(folder, "run.json"))


if __name__ == "__main__":
    # A grandchild of the run: what ends all descendants of a run must leave its watcher.
    if os.fork() == 0:
        watch(*sys.argv[1:])
