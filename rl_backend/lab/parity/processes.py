"""The processes of one side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Protocol

from rl_backend.contracts import ParityError
from rl_backend.lab.parity.config import ParityConfig, SideName
from rl_backend.lab.parity.record import RankRecord
from rl_backend.parallel.store import host_store, prefer_loopback, store_environment

GRACE_SECONDS = 5.0
"""How long the other ranks of a side may take to report their own error after the first has failed."""

_POLL_SECONDS = 0.05
_LOG_LINES = 20
_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *store_environment(0))


class RankProcess(Protocol):
    """What a started rank must have of ``subprocess.Popen``."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> object: ...


type StartRank = Callable[[Sequence[str], Mapping[str, str], Path], RankProcess]
"""(arguments of :mod:`rl_backend.lab.parity.rank`, environment, file for what it prints) -> the started process."""


def start_rank(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> RankProcess:
    """A new Python."""
    command = [sys.executable, "-m", "rl_backend.lab.parity.rank", *arguments]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )


@dataclass(frozen=True)
class _Rank:
    index: int
    process: RankProcess
    output: Path
    log: Path


def run_ranks(
    config: ParityConfig, name: SideName, device: str, folder: Path, start: StartRank = start_rank
) -> list[RankRecord]:
    """Runs one side, a process for each rank, and returns their records.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: for files; must outlive the records.
        start: starts the process of a rank.

    Raises:
        ParityError: a rank failed or died, or the side took longer than ``config.timeout``. No process is left. Its detail
            ``refused`` is True where the runtime does not serve the model or the layout.
    """
    folder.mkdir()
    config_file = folder / "config.json"
    config_file.write_text(config.replace(device=device).model_dump_json())
    world_size = config.side(name).world_size
    # Served here for as long as the ranks live.
    store = host_store(timedelta(seconds=config.timeout))
    ranks: list[_Rank] = []
    try:
        for index in range(world_size):
            environment = _environment(config, device, index, world_size, store.port)
            output, log = folder / f"rank-{index}.pt", folder / f"rank-{index}.log"
            ranks.append(_Rank(index, start([str(config_file), name, str(output)], environment, log), output, log))
        _wait(ranks, f"the {name} {config.side(name).runtime!r}", config.timeout)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
    return [RankRecord.load(rank.output) for rank in ranks]


def _environment(config: ParityConfig, device: str, rank: int, world_size: int, port: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _JOB}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(config.threads)
    prefer_loopback(environment)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if world_size > 1:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment |= store_environment(port)
    return environment


def _wait(ranks: Sequence[_Rank], side: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        states = [rank.process.poll() for rank in ranks]
        failed = [rank for rank, status in zip(ranks, states, strict=True) if status not in (None, 0)]
        if failed:
            _wait_for_all(ranks, GRACE_SECONDS)
            _raise_failure([*failed, *(rank for rank in ranks if rank not in failed and rank.process.poll())], side)
        if all(status == 0 for status in states):
            return
        if time.monotonic() > deadline:
            running = [rank.index for rank, status in zip(ranks, states, strict=True) if status is None]
            raise ParityError(
                f"{side} did not end within {timeout:g} s; ranks still running: {running}; raise --timeout, or see what "
                f"they print:\n{_tail(ranks[running[0]].log)}"
            )
        time.sleep(_POLL_SECONDS)


def _wait_for_all(ranks: Sequence[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(rank.process.poll() is None for rank in ranks):
        time.sleep(_POLL_SECONDS)


def _raise_failure(failed: Sequence[_Rank], side: str) -> NoReturn:
    """Raises the error that says most: one of ours, else of a rank that could say nothing, else the earliest."""
    files = {rank.index: Path(f"{rank.output}.error") for rank in failed}
    told = sorted((r for r in failed if files[r.index].is_file()), key=lambda r: files[r.index].stat().st_mtime_ns)
    errors = [(rank, json.loads(files[rank.index].read_text())) for rank in told]
    expected = [(rank, error) for rank, error in errors if error["expected"]]
    if expected:
        rank, error = expected[0]
        raise ParityError(f"{side} stopped: {error['message']}", rank=rank.index, refused=error["refused"])
    dead = [rank for rank in failed if rank not in told]
    if dead:
        rank = dead[0]
        raise ParityError(
            f"rank {rank.index} of {side} died with status {rank.process.returncode}:\n{_tail(rank.log)}", rank=rank.index
        )
    rank, error = errors[0]
    raise ParityError(f"rank {rank.index} of {side} failed:\n{error['traceback']}", rank=rank.index)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
