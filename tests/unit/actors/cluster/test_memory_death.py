"""What is said of a process that Ray killed for want of memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError

from actors.cluster import ray_watch
from actors.cluster.placement import memory_environment
from actors.cluster.ray_watch import WHAT_TO_SET, memory_death, memory_held
from actors.rollout.group import calls
from examples.grpo import GRPOConfig
from rl_backend.options.command_line import parse_config

RAY = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1) where the task (actor "
    "ID: 3b, name=RolloutEngine.__init__, pid=7) was running was 22.50GB / 23.54GB (0.955), which exceeds "
    "the memory usage threshold of 0.95. Ray killed this worker (ID: 4c) because it was the most recently scheduled task.\n"
    "Top 10 memory users:\nPID\tMEM(GB)\tCOMMAND\n11\t3.41\tray::RolloutEngine.generate\n12\t15.50\tray::TrainWorker\n"
    "13\t0.61\t/usr/bin/python -m rl_backend.cli grpo\n14\t0.07\tray::IDLE\nRefer to the documentation."
)


def test_who_held_how_much_is_said_and_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    told = memory_death(OutOfMemoryError(RAY))
    assert told == (
        "its machine ran out of memory, 22.50 of 23.54 GB in use (training rank 15.5 GB; engine 3.41 GB; python 0.61 GB), "
        f"and Ray killed it; {WHAT_TO_SET}"
    )
    assert memory_death(OutOfMemoryError("low")).startswith("its machine ran out of memory, and Ray killed it; lower")
    assert not memory_death(ActorDiedError())

    def died(*_: object, **__: object) -> None:
        raise OutOfMemoryError(RAY)

    monkeypatch.setattr(calls.ray, "get", died)
    assert calls.outcome_of(None, "engine 0").message == f"engine 0 is dead: {told}"


def test_options_that_are_named_are_those_of_a_run() -> None:
    needed = ["--model", "m", "--dataset", "d", "--reward", "r.py:f"]
    options = dict(re.findall(r"(--[\w.-]+)(?: (full))?", WHAT_TO_SET))
    given = [word for name, value in options.items() for word in (name, value or "2048")]
    train = parse_config(GRPOConfig, "", [*needed, *given]).train
    assert (train.max_tokens_per_micro_batch, train.backend_cfg.activation_checkpointing) == (2048, "full")


def test_processes_of_this_machine_that_hold_much_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_SHOWN", 10_000)
    monkeypatch.setattr(ray_watch, "_LEAST", 0.0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    sizes = [float(size) for size in re.findall(r"(?:^|; )python\S* (\S+) GB", memory_held())]
    assert any(size == pytest.approx(resident, rel=0.1) for size in sizes) and sizes == sorted(sizes, reverse=True)


def test_the_allocator_keeps_memory_for_the_next_pass_unless_the_user_tunes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert "glibc.malloc.mmap_max=0" in memory_environment()["GLIBC_TUNABLES"].split(":")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert memory_environment() == {}


def test_of_many_processes_the_largest_are_named_by_what_they_are() -> None:
    table = "".join(
        f"{number}\t{size}\t{command}\n"
        for number, (size, command) in enumerate(
            (
                ("0.49", "ray::TrainWorker"),
                ("2.5", "/opt/a/very/long/" + "n" * 60 + " --flag"),
                ("0.5", "ray::IDLE"),
                ("9", "ray::Other.method"),
                ("1.25", "bash -c x"),
                ("0.75", "last"),
            )
        )
    )
    told = memory_death(OutOfMemoryError(f"used 10.5GB / 11GB\nPID\tMEM(GB)\tCOMMAND\n{table}"))
    assert f"10.5 of 11 GB in use (Ray's worker 9 GB; {'n' * 40} 2.5 GB; bash 1.25 GB; last 0.75 GB), and" in told
    assert ray_watch._largest([(0.5, "a"), (0.49, "b")]) == "a 0.5 GB"


def test_a_process_without_a_command_is_the_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_SHOWN", 100_000)
    monkeypatch.setattr(ray_watch, "_LEAST", 0.0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        # It has ended, and nobody has waited for it yet.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert "kernel 0 GB" in memory_held()
