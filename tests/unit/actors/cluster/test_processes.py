"""Processes by number and start: living, stopped, ended, and another one of the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from actors.cluster.processes import Process
from tests.support.actors_in_process import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_process_is_stopped_continues_and_ends(child: subprocess.Popen[bytes]) -> None:
    process = Process.of(child.pid)
    assert not process.is_stopped and not process.has_ended
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: process.is_stopped)
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not process.is_stopped)
    os.kill(child.pid, signal.SIGSTOP)
    process.kill()
    until(lambda: process.has_ended)  # nobody has waited for it yet
    assert not process.is_stopped and child.wait() == -signal.SIGKILL and process.has_ended
    process.kill()


def test_another_process_of_the_same_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    earlier = Process.of(child.pid)._replace(started="1")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: Process.of(child.pid).is_stopped)
    assert earlier.has_ended and not earlier.is_stopped
    earlier.kill()
    time.sleep(0.05)
    assert child.poll() is None
