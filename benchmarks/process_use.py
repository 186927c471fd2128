"""Memory and processor time of a command with all that it starts, over time, read from ``/proc``."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL_SECONDS = 0.25
MARK = "RL_BACKEND_BENCHMARK_RUN"
"""A variable that a command is started with: processes that inherit it are its own, also those that left its group."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Use:
    """Samples of a command while it ran.

    Attributes:
        at: seconds, by :func:`time.monotonic`.
        cpu: seconds of processor time until then, of processes that have ended too.
        memory: bytes by kind of process: each process's share of the pages that it maps (PSS).
        lines: when each line of the watched file was seen.
    """

    at: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    lines: list[float] = field(default_factory=list)

    def cpu_at(self, moment: float) -> float:
        """Processor seconds at the last sample before a moment."""
        return self.cpu[max(bisect_right(self.at, moment) - 1, 0)]

    def peak(self, *kinds: str) -> int:
        """Largest sum of bytes over processes of these kinds, or of all without one."""
        return max(sum(size for kind, size in each.items() if not kinds or kind in kinds) for each in self.memory)


def watch(command: Sequence[str], *, lines_of: Path, log: Path, environment: Mapping[str, str]) -> Use:
    """Runs a command to its end, with its output in ``log``.

    Args:
        lines_of: a file of which the command writes one line a step.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    mark = uuid.uuid4().hex
    use, done = Use(), threading.Event()
    cpu: dict[int, float] = {}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment, MARK: mark}
        )
        sampler = threading.Thread(target=_sample, args=(mark, lines_of, use, cpu, done))
        sampler.start()
        try:
            status = process.wait()
        finally:
            process.kill()
            done.set()
            sampler.join()
    if status:
        raise subprocess.CalledProcessError(status, command, output=log.read_text()[-2000:])
    return use


def processes(mark: str) -> Iterator[tuple[int, str]]:
    """Number and command of every living process that was started with this :data:`MARK`."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes()
                yield int(folder.name), command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile


def kind_of(command: str) -> str:
    """What a process is: a training rank, an engine, one of an engine's workers, or the rest (the program itself, Ray's
    servers, idle workers).
    """
    if command.startswith("ray::TrainWorker"):
        return "rank"
    if command.startswith("VLLM::Worker"):
        return "worker"
    if "EngineActor" in command or "EngineCore" in command or "RolloutEngine" in command:
        return "engine"
    return "rest"


def pss(pid: int) -> int:
    """Bytes that a process holds; of memory that processes share each has its part. OSError for one that has ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _sample(mark: str, lines_of: Path, use: Use, cpu: dict[int, float], done: threading.Event) -> None:
    while not done.wait(INTERVAL_SECONDS):
        memory: dict[str, int] = {}
        for pid, command in processes(mark):
            folder, kind = Path("/proc") / str(pid), kind_of(command)
            try:
                times = (folder / "stat").read_text().rpartition(")")[2].split()
                cpu[pid] = (int(times[11]) + int(times[12])) / _TICKS
                memory[kind] = memory.get(kind, 0) + pss(pid)
            except (OSError, IndexError):
                continue  # it has ended meanwhile
        count = len(lines_of.read_bytes().splitlines()) if lines_of.is_file() else 0
        now = time.monotonic()
        use.lines.extend([now] * (count - len(use.lines)))
        use.at.append(now)
        use.cpu.append(sum(cpu.values()))
        use.memory.append(memory)
