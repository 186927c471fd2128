"""Processes of a host, told apart from later ones that have the same number, where they are, and tasks of other nodes."""

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Places in what _stat returns.
_STATE, _PARENT, _START = 0, 1, 19
_ENDED, _STOPPED = ("Z", "X", "x"), ("T", "t")
_STACKS, _STACKS_SECONDS = "rl_backend_stacks", 2.0
# How torch, Megatron and the runtimes wait: for a work, or for a tensor that one will fill.
_WAIT = re.compile(r"\bwait(_tensor)?\(")


class Process(NamedTuple):
    """A process, by its number and when it started, in clock ticks after boot; empty of one that had ended by then."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid, start_time(pid))

    @property
    def has_ended(self) -> bool:
        return not self.started or start_time(self.pid) != self.started

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, so that it does nothing until another one comes."""
        fields = _stat(self.pid)
        return bool(fields) and fields[_START] == self.started and fields[_STATE] in _STOPPED

    def kill(self) -> None:
        """Ends it by SIGKILL, which a stopped process obeys too."""
        if not self.has_ended:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def descendants() -> set[Process]:
    """The processes that this one has started, and those that they have."""
    parents = {}
    for folder in filter(str.isdigit, os.listdir("/proc")):
        # Where /proc hides other users' processes: those that this one has started are its own user's.
        with suppress(PermissionError):
            if fields := _stat(int(folder)):
                parents[Process(int(folder), fields[_START])] = int(fields[_PARENT])
    found, new = set[Process](), {os.getpid()}
    while new:
        children = {process for process, parent in parents.items() if parent in new} - found
        found, new = found | children, {process.pid for process in children}
    return found


def call_on_node(node_id: str, function: Callable[..., object], *arguments: Any) -> Any:
    """Calls a function in a task of that node alone, once; a reference to its result."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(*arguments)


def offer_stacks() -> None:
    """Lets :func:`stacks_of` ask this process, from now on, with SIGUSR1, which is answered even by code that keeps Python's
    lock.
    """
    # A file in memory: it ends with the process, however that ends.
    faulthandler.register(signal.SIGUSR1, os.memfd_create(_STACKS), all_threads=True)


def stacks_of(process: Process) -> str:
    """Where each thread of a process of this host is, the innermost call first; empty of one that is stopped or does not
    offer it.
    """
    with suppress(OSError):  # it ends meanwhile
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(file) == f"/memfd:{_STACKS} (deleted)" and not (process.is_stopped or process.has_ended):
                return _asked(process, file)
    return ""


def _asked(process: Process, file: Path) -> str:
    before, found, deadline = len(file.read_bytes()), b"", time.monotonic() + _STACKS_SECONDS
    os.kill(process.pid, signal.SIGUSR1)
    while time.monotonic() < deadline:
        time.sleep(0.05)
        last, found = found, file.read_bytes()[before:]
        if found and found == last:
            break
    return found.decode(errors="replace")


class Place(NamedTuple):
    """Where a thread is.

    Attributes:
        calls: the innermost ones: ``step (adam.py:12), called from ...``; empty where it is not known.
        waits: for a collective or another transfer, by the line of the innermost call.
    """

    calls: str
    waits: bool


def place_in(stacks: str, below: str, most: int = 4) -> Place:
    """Of a text of :func:`stacks_of` the place of the thread that has a call of ``below`` (``file.py:function``)."""
    for thread in stacks.split("\n\n"):
        calls = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', thread)
        names = [f"{Path(file).name}:{function}" for file, _, function in calls]
        if below in names:
            calls = calls[: names.index(below)] or calls[:1]
            said = (f"{function} ({Path(file).name}:{line})" for file, line, function in calls[:most])
            innermost = linecache.getline(calls[0][0], int(calls[0][1]))
            return Place(", called from ".join(said), waits=_WAIT.search(innermost) is not None)
    return Place("", waits=False)


def driver_mark() -> str:
    """This process, as those that it starts through Ray have it in ``RL_BACKEND_DRIVER``."""
    return f"{os.getpid()}-{start_time(os.getpid())}"


def start_time(pid: int) -> str:
    """When a process started; empty where none of that number lives."""
    fields = _stat(pid)
    # A killed process whose parent does not wait for it stays as a zombie, for ever in a container without an init.
    return "" if not fields or fields[_STATE] in _ENDED else fields[_START]


def _stat(pid: int) -> list[str]:
    """The fields behind the command, which stands in parentheses and may hold spaces; none where no such process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
