"""A comparison from its configuration to its result: each rank of a side is a process."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.child_process import open_lifeline, tie
from rl_backend.contracts import ConfigError, ParityError, text_config
from rl_backend.lab.parity.compare import Comparison, Tolerances, compare
from rl_backend.lab.parity.config import SIDES, TRANSFORMERS, ParityConfig, SideName, make_sequences, plan_batch
from rl_backend.lab.parity.record import RankRecord, SideRecord, merge_ranks
from rl_backend.model import model_kept_prefixes
from rl_backend.parallel.groups import host_store, prefer_loopback, store_environment

GRACE_SECONDS = 5.0
"""How long the other ranks of a side may take to report their own error after the first has failed."""

_POLL_SECONDS = 0.05
_LOG_LINES = 20
_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *store_environment(0))


class RankProcess(Protocol):
    """What a started rank must have of ``subprocess.Popen``."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> object: ...


type StartRank = Callable[[Sequence[str], Mapping[str, str], Path], RankProcess]
"""(arguments of :mod:`rl_backend.lab.parity.rank`, environment, file for what it prints) -> the started process."""


def start_rank(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> RankProcess:
    """A new Python, which ends with this process."""
    command = [sys.executable, "-m", "rl_backend.lab.parity.rank", *arguments]
    with log.open("wb") as stream, open_lifeline() as line:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=[line.fileno()],
        )
        tie(process.pid, line)
    return process


@dataclass(frozen=True)
class ParityResult:
    """A comparison and what it was of.

    Attributes:
        config: its device is ``cpu`` or ``cuda``.
        num_tokens: of the batch.
        versions: side -> package -> version.
    """

    config: ParityConfig
    num_tokens: int
    comparison: Comparison
    versions: dict[SideName, dict[str, str]]


def run_parity(config: ParityConfig, tolerances: Tolerances, tell: Callable[[str], None] = lambda _: None) -> ParityResult:
    """Runs the reference, then the candidate, and compares them.

    Args:
        tell: is called with what is being done.

    Raises:
        RLBackendError: a model directory, layout or option that the configurations refuse, before a process starts; or a
            side that does not run to its end, for example because its runtime refuses the model or layout.
    """
    config = config.replace(device=_device(config))
    checkpoint = HFReader(config.model)
    sequences = make_sequences(config, checkpoint.config)
    for name in SIDES:
        if (side := config.side(name)).runtime != TRANSFORMERS:
            config.runtime_config(side)
    records: dict[SideName, SideRecord] = {}
    # Records map their files, so the folder must outlive the comparison.
    with tempfile.TemporaryDirectory(prefix="rl-backend-parity-") as folder:
        for name in SIDES:
            side = config.side(name)
            tell(f"{name}: {side.runtime} in {side.world_size} {'process' if side.world_size == 1 else 'processes'}")
            records[name] = record_side(config, name, Path(folder) / name)
        comparison = compare_sides(config, records["reference"], records["candidate"], tolerances)
        versions = {name: dict(record.versions) for name, record in records.items()}
    return ParityResult(config, sum(map(len, sequences)), comparison, versions)


@dataclass(frozen=True)
class _Rank:
    index: int
    process: RankProcess
    output: Path
    log: Path

    @property
    def error(self) -> Path:
        return Path(f"{self.output}.error")

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def record_side(config: ParityConfig, name: SideName, folder: Path, start: StartRank = start_rank) -> SideRecord:
    """Runs one side, each rank in a new process.

    Args:
        folder: for the record's files; is made, and must outlive the record.
        start: starts the process of a rank.

    Raises:
        ParityError: a rank failed or died, or the side took longer than ``config.timeout``. No process is left. Its detail
            ``refused`` is True where the runtime does not serve the model or the layout.
    """
    folder.mkdir()
    config_file = folder / "config.json"
    config_file.write_text(config.model_dump_json())
    side = config.side(name)
    # Served here for as long as the ranks live.
    store = host_store(timedelta(seconds=config.timeout))
    ranks: list[_Rank] = []
    try:
        for index in range(side.world_size):
            environment = _environment(config, index, side.world_size, store.port)
            output, log = folder / f"rank-{index}.pt", folder / f"rank-{index}.log"
            ranks.append(_Rank(index, start([str(config_file), name, str(output)], environment, log), output, log))
        _wait(ranks, f"the {name} {side.runtime!r}", config.timeout)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
    return merge_ranks([RankRecord.load(rank.output) for rank in ranks], plan_batch(config, side.data_parallel_size))


def _environment(config: ParityConfig, rank: int, world_size: int, port: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _JOB}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(config.threads)
    prefer_loopback(environment)
    if config.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if world_size > 1:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        environment |= store_environment(port)
    return environment


def _wait(ranks: Sequence[_Rank], side: str, timeout: float) -> None:
    """Returns when all ranks have succeeded; after a first failure the others have :data:`GRACE_SECONDS` to tell theirs."""
    deadline = time.monotonic() + timeout
    failed: list[_Rank] = []
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        new = [rank for rank in ranks if rank.process.poll() and rank not in failed]
        if new and not failed:
            deadline = time.monotonic() + GRACE_SECONDS
        failed += new
        if not running or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    if failed:
        raise _failure(failed, side)
    if running:
        raise ParityError(
            f"{side} did not end within {timeout:g} s; ranks still running: {[rank.index for rank in running]}; raise "
            f"--timeout, or see what they print:\n{running[0].last_lines()}"
        )


def _failure(failed: Sequence[_Rank], side: str) -> ParityError:
    """The error that says most: one of ours, else of a rank that could say nothing, else the earliest."""
    told = sorted((rank for rank in failed if rank.error.is_file()), key=lambda rank: rank.error.stat().st_mtime_ns)
    errors = [(rank.index, json.loads(rank.error.read_text())) for rank in told]
    for index, error in errors:
        if error["expected"]:
            return ParityError(f"{side} stopped: {error['message']}", rank=index, refused=error["refused"])
    for rank in failed:
        if rank not in told:
            died = f"rank {rank.index} of {side} died with status {rank.process.poll()}"
            return ParityError(f"{died}:\n{rank.last_lines()}", rank=rank.index)
    index, error = errors[0]
    return ParityError(f"rank {index} of {side} failed:\n{error['traceback']}", rank=index)


def compare_sides(config: ParityConfig, reference: SideRecord, candidate: SideRecord, tolerances: Tolerances) -> Comparison:
    """Compares two sides that trained on the model and batch of ``config``, whatever their layouts."""
    checkpoint = HFReader(config.model)
    kept = model_kept_prefixes(checkpoint.config)
    trained = [name for name in checkpoint.infos if not name.startswith(kept)]
    return compare(reference, candidate, tolerances, required_modules(checkpoint.config, trained))


def required_modules(hf_config: Mapping[str, Any], stored_names: Collection[str]) -> tuple[str, ...]:
    """Paths of the layers and of the modules beside their list that have weights: the embedding and the last norm.

    The list is where the stored names are numbered, ``model.layers`` in ``model.layers.0.mlp.up_proj.weight``.

    Args:
        hf_config: ``config.json``, whose ``num_hidden_layers`` counts the layers.
        stored_names: of the tensors in the checkpoint, without those that are not trained.

    Raises:
        ConfigError: ``num_hidden_layers`` is no positive whole number, or the checkpoint has not as many layers.
    """
    count = text_config(hf_config).get("num_hidden_layers")
    if not isinstance(count, int) or count < 1:
        raise ConfigError.of("config.json num_hidden_layers", count, "expected a whole number of at least 1")
    numbered = [match for name in stored_names if (match := re.match(r"(.+?)\.(\d+)\.", name))]
    lists = dict.fromkeys(match[1] for match in numbered if int(match[2]) == count - 1)
    if not lists:
        raise ConfigError.of("config.json num_hidden_layers", count, f"the checkpoint has no layer {count - 1}")
    parents = {path.rpartition(".")[0] for path in lists}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stored_names)
    beside = [module for module in modules if module.rpartition(".")[0] in parents]
    return (*beside, *(f"{path}.{index}" for path in lists for index in range(count)))


def _device(config: ParityConfig) -> str:
    """Raises :class:`ConfigError` when there is not a CUDA device for every rank."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return "cpu"
    needed = max(config.side(name).world_size for name in SIDES)
    if needed > found:
        raise ConfigError.of(
            "ParityConfig.device", config.device, f"the layout needs {needed} CUDA devices, found {found}; 'cpu' needs none"
        )
    return "cuda"
