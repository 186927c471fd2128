"""A pool of processes that play the ranks of a job, started once for all tests."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rl_backend.child_process import open_lifeline, tie

_START_METHOD = os.environ.get("RANK_POOL_START_METHOD", "forkserver")
"""``fork`` where each run has a few tests only and time counts (tests/mutations); ranks then have what the test has.

The server of ``forkserver`` imports ``preload`` once, for all ranks and for those that take the place of dead ones.
"""
_START_SECONDS = 200.0


class RankError(AssertionError):
    """A function failed on one or more ranks; the message has every traceback, ``errors`` the exceptions by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection
    stacks: Path


class RankPool:
    """Up to ``size`` ranks over gloo, one CPU thread each.

    A job is an importable function with picklable arguments. For each job the first ``world_size`` processes initialise a
    default process group of that size and destroy it afterwards.

    Args:
        preload: modules that every process imports when it starts, so that no job's time limit pays for them.
    """

    def __init__(self, size: int = 4, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._preload = () if _START_METHOD == "fork" else tuple(preload)
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._num_jobs = 0

    def run[R](
        self,
        function: Callable[..., R],
        *args: Any,
        world_size: int = 2,
        timeout: float = 240.0,
        init_group: bool = True,
    ) -> list[R]:
        """Runs ``function(*args)`` on ``world_size`` ranks and returns what each returned, by rank.

        Args:
            timeout: seconds; a job that takes longer fails with the stacks of the ranks that hang, and the pool restarts.
                Long, since processes of other lanes (``tests/lanes.py``) may leave ranks little of a core for a minute.
            init_group: False leaves the process group to the function; ``RANK``, ``WORLD_SIZE`` and so on are set.

        Raises:
            RankError: a rank raised. The pool restarts when others then hang.
            TimeoutError: no rank raised and one hangs or died.
        """
        if not self._ranks:
            self._start()
        self._num_jobs += 1
        job = pickle.dumps((function, args))
        store = os.path.join(self._folder.name, f"store-{self._num_jobs}")
        for rank in self._ranks[:world_size]:
            rank.connection.send((job, world_size, store, init_group))
        answers, hung = self._collect(world_size, timeout)
        errors = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        if hung:
            stacks = self._stacks(hung)
            self.close()
            if not errors:
                raise TimeoutError(f"{function.__qualname__}: ranks {hung} did not answer in {timeout} s\n{stacks}")
        if any(not rank.process.is_alive() for rank in self._ranks):
            self.close()
        if errors:
            text = "\n".join(f"--- rank {rank}\n{failure.text}" for rank, failure in sorted(errors.items()))
            waiting = f"\nranks {hung} were still waiting" if hung else ""
            raise RankError(
                f"{function.__qualname__} failed on ranks {sorted(errors)}{waiting}\n{text}",
                {rank: failure.error for rank, failure in errors.items()},
            )
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes; the next job starts new ones."""
        for rank in self._ranks:
            rank.connection.close()
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
        self._ranks = []

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(_START_METHOD)
        if _START_METHOD == "forkserver":
            context.set_forkserver_preload(["benchmarks.ending_server", *self._preload])
        for index in range(self.size):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name, f"stacks-{index}")
            with theirs, open_lifeline() as line:
                arguments = (index, theirs, str(stacks), self._preload, line)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                tie(process.pid, line)
            self._ranks.append(_Rank(process, ours, stacks))
        for index, rank in enumerate(self._ranks):
            if not rank.connection.poll(_START_SECONDS):
                self.close()
                raise TimeoutError(f"rank {index} did not start in {_START_SECONDS} s")
            rank.connection.recv_bytes()

    def _collect(self, world_size: int, timeout: float) -> tuple[dict[int, Any], list[int]]:
        """Answers by rank, and the ranks that gave none. After a first failure the others get a few seconds."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world_size and time.monotonic() < deadline:
            for index, rank in enumerate(self._ranks[:world_size]):
                if index in answers or not rank.connection.poll(0.002):
                    continue
                try:
                    answers[index] = pickle.loads(rank.connection.recv_bytes())
                except EOFError:
                    rank.process.join(5)  # its end of the pipe is closed a moment before it is gone
                    answers[index] = _Failure("the process died", RuntimeError("the process died"))
                if isinstance(answers[index], _Failure):
                    deadline = min(deadline, time.monotonic() + 10.0)
        return answers, [rank for rank in range(world_size) if rank not in answers]

    def _stacks(self, ranks: list[int]) -> str:
        parts = []
        for index in ranks:
            rank = self._ranks[index]
            if rank.process.pid is not None and rank.process.is_alive():
                os.kill(rank.process.pid, signal.SIGUSR1)
                time.sleep(0.5)
            parts.append(f"--- rank {index}\n{rank.stacks.read_text() if rank.stacks.exists() else 'no stack'}")
        return "\n".join(parts)


@dataclass
class _Failure:
    text: str
    error: BaseException


def _serve(rank: int, connection: Connection, stacks: str, preload: tuple[str, ...], line: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.set_num_threads(1)
    for name in preload:
        importlib.import_module(name)
    gc.freeze()
    modules = len(sys.modules)
    connection.send_bytes(b"ready")
    with open(stacks, "w") as stream:
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
        while True:
            try:
                job, world_size, store, init_group = connection.recv()
            except EOFError:
                return
            connection.send_bytes(_run_job(rank, job, world_size, store, init_group))
            # A runtime that closes collects garbage. What modules hold is none, and takes longer to look at than a job.
            if len(sys.modules) > modules:
                modules = len(sys.modules)
                gc.collect()
                gc.freeze()


def _run_job(rank: int, job: bytes, world_size: int, store: str, init_group: bool) -> bytes:
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined] # not in its __all__

    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ.update(environment)
    try:
        if init_group:
            dist.init_process_group("gloo", store=FileStore(store, world_size), rank=rank, world_size=world_size)
            # A rank with little to do must not close its end while another still connects.
            dist.barrier()
        function, args = pickle.loads(job)
        return pickle.dumps(function(*args))
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - sent to the test
        return _pickle_failure(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in environment:
            os.environ.pop(name)


def _pickle_failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps(_Failure(text, error))
    except Exception:  # noqa: BLE001 - an exception of any type may refuse to be pickled
        return pickle.dumps(_Failure(text, RuntimeError(repr(error))))
