"""Processes of a host, told apart from later ones that have the same number, and tasks beside those of other nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_ENDED, _STOPPED = ("Z", "X", "x"), ("T", "t")


class Process(NamedTuple):
    """A process, by its number and when it started, in clock ticks after boot."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Self:
        return cls(pid, start_time(pid))

    @property
    def has_ended(self) -> bool:
        return start_time(self.pid) != self.started

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, so that it does nothing until another one comes."""
        state, started = _stat(self.pid)
        return started == self.started and state in _STOPPED

    def kill(self) -> None:
        """Ends it by SIGKILL, which a stopped process obeys too."""
        if not self.has_ended:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def call_on_node(node_id: str, function: Callable[..., object], *arguments: Any) -> Any:
    """Calls a function in a task of that node alone, once; a reference to its result."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(*arguments)


def start_time(pid: int) -> str:
    """When a process started; empty where none of that number lives."""
    state, started = _stat(pid)
    # A killed process whose parent does not wait for it stays as a zombie, for ever in a container without an init.
    return "" if state in _ENDED else started


def _stat(pid: int) -> tuple[str, str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    # The second field is the command in parentheses and may hold spaces; state is the 3rd, start time the 22nd.
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]
