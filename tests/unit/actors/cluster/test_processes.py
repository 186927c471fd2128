"""Processes by number and start: living, stopped, ended, and another one of the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster import processes
from actors.cluster.processes import Place, Process, place_in, stacks_of
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


def test_processes_that_proc_hides_are_no_descendants(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, ours = processes._stat, (os.getpid(), child.pid)

    def hides(pid: int) -> list[str]:
        if pid not in ours:
            raise PermissionError(pid)
        return read(pid)

    monkeypatch.setattr(processes, "_stat", hides)
    assert processes.descendants() == {Process.of(child.pid)}


def test_another_process_of_the_same_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    earlier = Process.of(child.pid)._replace(started="1")
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: Process.of(child.pid).is_stopped)
    assert earlier.has_ended and not earlier.is_stopped
    earlier.kill()
    time.sleep(0.05)
    assert child.poll() is None


PROGRAM = """
import ctypes, sys
from actors.cluster.processes import offer_stacks

def hold():
    print("there", flush=True)
    while True:  # a signal ends it
        ctypes.PyDLL(None).sleep(60)

def outer():
    hold()

offer_stacks()
outer()
"""


def test_a_process_says_where_it_is_although_it_keeps_pythons_lock(child: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as holding:
        assert holding.stdout is not None
        holding.stdout.readline()
        process = Process.of(holding.pid)
        for _ in range(2):
            assert place_in(stacks_of(process), "<string>:outer").calls.startswith("hold (<string>:")
        os.kill(holding.pid, signal.SIGSTOP)
        until(lambda: process.is_stopped)
        began = time.monotonic()
        assert stacks_of(process) == "" and time.monotonic() - began < 1
        process.kill()
    assert stacks_of(process) == "" and stacks_of(Process.of(child.pid)) == "" and child.poll() is None


def test_a_process_with_other_files_in_memory_is_not_asked_which_would_end_it() -> None:
    files = [os.memfd_create(name) for name in ("rl_backend_boundary", "rl_backend_stacks_of_another")]
    with subprocess.Popen(["sleep", "60"], pass_fds=files) as other:
        assert stacks_of(Process.of(other.pid)) == "" and other.poll() is None
        other.kill()
    for file in files:
        os.close(file)


def test_the_calls_of_the_thread_that_is_asked_for_are_named_innermost_first() -> None:
    frames = "".join(f'  File "/a/b{number}.py", line {number} in f{number}\n' for number in range(9))
    stacks = f'Thread 0x1 (most recent call first):\n  File "/a/x.py", line 1 in x\n\nCurrent thread 0x2:\n{frames}'
    assert place_in(stacks, "b2.py:f2").calls == "f0 (b0.py:0), called from f1 (b1.py:1)"
    assert place_in(stacks, "b8.py:f8", most=1).calls == "f0 (b0.py:0)"
    assert place_in(stacks, "b0.py:f0").calls == "f0 (b0.py:0)"
    assert place_in(stacks, "b1.py:f9") == place_in("", "b1.py:f1") == Place("", waits=False)


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("work.wait()", True),
        ("return torch.ops._c10d_functional.wait_tensor(tensor)", True),
        ("for work in works: work.wait()", True),
        ("os.waitpid(pid, 0)", False),
        ("loss = self.await_it(rows)", False),
        ("loss.backward()", False),
    ],
)
def test_the_line_of_the_innermost_call_says_whether_it_waits_for_a_transfer(tmp_path: Path, line: str, waits: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"work.wait()\n{line}\nwork.wait()\n")
    calls = f'  File "{file}", line 2 in step\n  File "{file}", line 1 in run\n'
    assert place_in(f"Thread 0x1:\n\nThread 0x2:\n{calls}", "mine.py:run").waits is waits
    assert not place_in(calls, "mine.py:other").waits


def test_a_process_that_is_another_user_s_is_not_ended_and_no_error(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, asked = Process.of(child.pid), list[tuple[int, int]]()

    def forbidden(pid: int, number: int) -> None:
        asked.append((pid, number))
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    process.kill()
    Process.of(2**22 + 1).kill()
    assert asked == [(child.pid, signal.SIGKILL)]


def test_a_function_is_called_once_in_a_task_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def remote(**options: Any) -> Any:
        told["remote"] = options
        return lambda function: SimpleNamespace(options=lambda **more: told.update(more) or SimpleNamespace(remote=function))

    monkeypatch.setattr(processes, "NodeAffinitySchedulingStrategy", lambda node, *, soft: (node, soft))
    monkeypatch.setattr(processes.ray, "remote", remote)
    assert processes.call_on_node("a node", lambda *given: given, 3, "x") == (3, "x")
    assert told == {"remote": {"num_cpus": 0, "max_retries": 0}, "scheduling_strategy": ("a node", False)}


def test_a_driver_is_known_by_its_number_and_its_start() -> None:
    pid, started = Process.of(os.getpid())
    assert started.isdigit() and processes.driver_mark() == f"{pid}-{started}"
