"""An engine's watch over the processes of its workers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from actors.cluster.processes import Process
from actors.rollout.engine.in_process import Workers
from actors.rollout.messages import STOPPED_LOOKS
from rl_backend.contracts import EngineDeadError
from tests.support.actors_in_process import until


@pytest.fixture
def children() -> Iterator[list[Process]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield [Process.of(process.pid) for process in started]
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("number", "says"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "is stopped")])
def test_an_engine_with_a_lost_worker_says_so_and_ends_the_others(children: list[Process], number: int, says: str) -> None:
    workers = Workers("engine 3")
    workers.check()
    workers.watch(children)
    workers.check()
    os.kill(children[1].pid, number)
    until(lambda: children[1].is_stopped or children[1].has_ended)
    if number == signal.SIGSTOP:
        for _ in range(STOPPED_LOOKS - 1):
            workers.check()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=rf"engine 3 is dead: its worker process {children[1].pid} {says}") as lost:
            workers.check()
        assert lost.value.details == {"engine": "engine 3", "hung": number == signal.SIGSTOP}
    until(lambda: all(child.has_ended for child in children))


def test_a_worker_that_is_stopped_for_moments_is_left_alone(children: list[Process]) -> None:
    workers = Workers("engine 3")
    workers.watch(children)
    for _ in range(3):
        os.kill(children[0].pid, signal.SIGSTOP)
        until(lambda: children[0].is_stopped)
        for _ in range(STOPPED_LOOKS - 1):
            workers.check()
        os.kill(children[0].pid, signal.SIGCONT)
        until(lambda: not children[0].is_stopped)
        workers.check()
