"""Ranks of a comparison as forks of a process that has imported everything: a rank starts in a second, not in fifteen."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from rl_backend.child_process import open_lifeline, tie
from rl_backend.lab.parity import rank

_IMPORTED = ("rl_backend.lab.parity.transformers_side", "rl_backend.runtime.bridge.engine.engine")


class ForkedRank:
    """A :class:`~rl_backend.lab.parity.run.RankProcess`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def start_forked_rank(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedRank:
    """As :func:`~rl_backend.lab.parity.run.start_rank`. Numbers of threads are those of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.ending_server", *_IMPORTED])
    with open_lifeline() as line:
        process = context.Process(target=_run, args=(list(arguments), dict(environment), str(log), line), daemon=True)
        process.start()
        assert process.pid is not None, "it has started"
        tie(process.pid, line)
    return ForkedRank(process)


def _run(arguments: list[str], environment: dict[str, str], log: str, line: Connection) -> None:
    with open(log, "wb") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    status = rank.main(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may outlive a failed rank.
    os._exit(status)
