"""The process beside a run that says so in ``run.json`` when the run is killed, and ends what outlives its process;
``RunWatch`` starts it.

python -I -S watcher.py FOLDER PROCESS DRIVER     PROCESS: ``process`` of run.json; standard input ends with the run
                                                  DRIVER: its process, by number and start: 4711-123456

It imports little, waits without polling, and has a session of its own, which Ctrl-C and signals to the run do not reach.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time

_TRY_SECONDS, _GIVE_UP_SECONDS = 0.2, 600.0
# What Ray's processes and theirs have to end by themselves, and then to end by SIGKILL.
_GRACE_SECONDS, _END_SECONDS = 5.0, 10.0
_MARK, _SHARED_MEMORY = b"RL_BACKEND_DRIVER=", "/dev/shm"


def watch(folder: str, process: str, driver: str) -> None:
    """Waits for the end of standard input, then turns the state "running" of the run into "killed"; ends what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    ended = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    # First: what is left may hold the lock, and the folder may not be written to.
    end_what_is_left(driver)
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    # Who holds the lock reads the folder for a moment, continues the run, or is a process that the run has left.
    # A run that ended in order, or that another process continues, is left alone.
    while is_running(folder, process) and not _say_killed(folder, process, ended) and time.monotonic() < deadline:
        time.sleep(_TRY_SECONDS)


def end_what_is_left(driver: str) -> None:
    """Ends the processes of a Ray that ``driver`` has started, with all that they started, one that is stopped too; then
    removes shared memory whose owner has ended. Does nothing while the driver lives.
    """
    pid, _, started = driver.partition("-")
    # A process that ends closes its files first.
    patience = time.monotonic() + _GRACE_SECONDS
    while _start_of(pid) == started:
        if time.monotonic() > patience:
            return
        time.sleep(_TRY_SECONDS)
    grace = time.monotonic() + _GRACE_SECONDS
    while (left := _started_by(driver)) and time.monotonic() < grace + _END_SECONDS:
        for each in left if time.monotonic() > grace else ():
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        time.sleep(_TRY_SECONDS)
    for name in os.listdir(_SHARED_MEMORY) if os.path.isdir(_SHARED_MEMORY) else ():
        # rl_backend_weights-NAMESPACE-PID-START-NUMBER, see actors/wire/segment.py
        kind, *owner = name.split("-")
        if kind != "rl_backend_weights" or len(owner) != 4 or owner[0] != str(os.stat("/proc/self/ns/pid").st_ino):
            continue
        if _start_of(owner[1]) != owner[2]:
            with contextlib.suppress(OSError):  # of another user, or removed meanwhile
                os.unlink(os.path.join(_SHARED_MEMORY, name))


def _started_by(driver: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if _MARK + driver.encode() in file.read().split(b"\0") and int(pid) != os.getpid() and _start_of(pid):
                found.append(int(pid))
    return found


def _start_of(pid: str) -> str:
    """Empty where none of that number lives; a zombie does not."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        state, *fields = file.read().rpartition(")")[2].split()
        return "" if state in "ZXx" else fields[18]
    return ""


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
