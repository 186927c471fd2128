"""A comparison from its configuration to its result and what is said of it: each rank of a side is a process."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.child_process import open_lifeline, tie
from rl_backend.contracts import ConfigError, ParityError, text_config
from rl_backend.lab.parity.compare import (
    Comparison,
    RankRecord,
    SideRecord,
    StageResult,
    StepComparison,
    StepNumbers,
    Tolerances,
    compare,
    merge_ranks,
    merge_steps,
)
from rl_backend.lab.parity.config import (
    SIDES,
    TRANSFORMERS,
    ParityConfig,
    Role,
    SideName,
    make_sequences,
    passage_tokens,
    plan_batch,
)
from rl_backend.lab.text import count, finite, table
from rl_backend.model import model_kept_prefixes
from rl_backend.parallel.groups import host_store, prefer_loopback, store_environment

# How long the other ranks of a side may take to report their own error after the first has failed.
GRACE_SECONDS = 5.0

_POLL_SECONDS = 0.05
_LOG_LINES = 20
_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", *store_environment(0))


class RankProcess(Protocol):
    """The part of ``subprocess.Popen`` that is used."""

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
        is_text: whether the tokens are those of a text.
    """

    config: ParityConfig
    num_tokens: int
    comparison: Comparison
    versions: dict[SideName, dict[str, str]]
    is_text: bool = False


def run_parity(config: ParityConfig, tolerances: Tolerances, tell: Callable[[str], None] = lambda _: None) -> ParityResult:
    """Runs the reference, then the candidate, then both once more, and compares them.

    The reference runs again in an order that changes only rounding; from its weights before each step the candidate takes
    that step alone.

    Args:
        tell: is called with what is being done.

    Raises:
        RLBackendError: a model directory, layout or option that is refused, or a side that does not run to its end.
    """
    config = config.replace(device=_device(config))
    checkpoint = HFReader(config.model)
    sequences = make_sequences(config, checkpoint.config)
    is_text = passage_tokens(config.model, checkpoint.config) is not None
    # Before a process starts.
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
        again = alone = None
        if config.steps > 1:
            states = make_states(config, Path(folder))
            tell("reference again, in another order: how far rounding alone leads")
            again = record_steps(config, "again", Path(folder) / "again", states)
            tell("candidate again, each step from the weights of the reference: each step alone")
            alone = record_steps(config, "alone", Path(folder) / "alone", states)
        comparison = compare_sides(config, records["reference"], records["candidate"], tolerances, again, alone)
        versions = {name: dict(record.versions) for name, record in records.items()}
    return ParityResult(config, sum(map(len, sequences)), comparison, versions, is_text)


def make_states(config: ParityConfig, folder: Path) -> Path:
    """The folder for the reference's weights before each step; refuses a disk that is too small for them."""
    states = folder / "states"
    states.mkdir()
    elements = sum(math.prod(info.shape) for info in HFReader(config.model).infos.values())
    needed, free = (config.steps - 1) * 4 * elements, shutil.disk_usage(states).free
    if config.lora is None and needed > free:
        raise ConfigError.of(
            "ParityConfig.steps",
            config.steps,
            f"the reference's weights before each step take {needed / 2**30:.1f} GiB of {folder.parent}, which has "
            f"{free / 2**30:.1f} free; take fewer steps, or set TMPDIR to a larger disk",
        )
    return states


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
    side = config.side(name)
    ranks = _run_ranks(config, name, name, folder, Path(), start)
    return merge_ranks(ranks, plan_batch(config, side.data_parallel_size))


def record_steps(config: ParityConfig, role: Role, folder: Path, states: Path, start: StartRank = start_rank) -> StepNumbers:
    """Runs a side again, as :func:`record_side`: the reference, which fills ``states``, or the candidate, which reads it."""
    name: SideName = "reference" if role == "again" else "candidate"
    ranks = _run_ranks(config, name, role, folder, states, start)
    return merge_steps(ranks, config.side(name).data_parallel_size)


def _run_ranks(
    config: ParityConfig, name: SideName, role: Role, folder: Path, states: Path, start: StartRank
) -> list[RankRecord]:
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
            ranks.append(
                _Rank(index, start([str(config_file), role, str(output), str(states)], environment, log), output, log)
            )
        _wait(ranks, f"the {name} {side.runtime!r}", config.timeout)
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.wait()
    return [RankRecord.load(rank.output) for rank in ranks]


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
    deadline = time.monotonic() + timeout
    failed: list[_Rank] = []
    while True:
        running = [rank for rank in ranks if rank.process.poll() is None]
        new = [rank for rank in ranks if rank.process.poll() and rank not in failed]
        # The first to fail may only be the victim of another, which has some time to tell.
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
    # The error that says most: one of ours, else of a rank that could say nothing, else the earliest.
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


def compare_sides(
    config: ParityConfig,
    reference: SideRecord,
    candidate: SideRecord,
    tolerances: Tolerances,
    again: StepNumbers | None = None,
    alone: StepNumbers | None = None,
) -> Comparison:
    """:func:`compare` of two sides that trained on the model and batch of ``config``."""
    checkpoint = HFReader(config.model)
    kept = model_kept_prefixes(checkpoint.config)
    trained = [name for name in checkpoint.infos if not name.startswith(kept)]
    return compare(reference, candidate, tolerances, required_modules(checkpoint.config, trained), again, alone)


def required_modules(hf_config: Mapping[str, Any], stored_names: Collection[str]) -> tuple[str, ...]:
    """Paths of the layers and of the modules beside their list that have weights: the embedding and the last norm.

    Args:
        stored_names: of the tensors in the checkpoint, without those that are not trained.

    Raises:
        ConfigError: the checkpoint has not as many layers as ``num_hidden_layers``.
    """
    layers = text_config(hf_config)["num_hidden_layers"]
    # The list is where stored names are numbered: model.layers in model.layers.0.mlp.up_proj.weight.
    numbered = [match for name in stored_names if (match := re.match(r"(.+?)\.(\d+)\.", name))]
    lists = dict.fromkeys(match[1] for match in numbered if int(match[2]) == layers - 1)
    if not lists:
        raise ConfigError.of("config.json num_hidden_layers", layers, f"the checkpoint has no layer {layers - 1}")
    parents = {path.rpartition(".")[0] for path in lists}
    modules = dict.fromkeys(name.rpartition(".")[0] for name in stored_names)
    beside = [module for module in modules if module.rpartition(".")[0] in parents]
    return (*beside, *(f"{path}.{index}" for path in lists for index in range(layers)))


def _device(config: ParityConfig) -> str:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cpu" or (config.device == "auto" and not found):
        return "cpu"
    needed = max(config.side(name).world_size for name in SIDES)
    if needed > found:
        raise ConfigError.of(
            "ParityConfig.device", config.device, f"the layout needs {needed} CUDA devices, found {found}; 'cpu' needs none"
        )
    return "cuda"


# Below it, the weights' tolerance hides what weight decay changes in a step.
LEAST_LR = 1e-5
# Part of itself by which the loss must fall for the later steps to say much.
LEAST_LOSS_FALL = 0.05


def as_text(result: ParityResult) -> str:
    """Tables of stages and steps, then the verdict."""
    config, comparison = result.config, result.comparison
    lines = [
        f"{config.model}: {config.dtype} on {config.device}, lr {config.lr:g}, {config.num_sequences} sequences of "
        f"{result.num_tokens} tokens {'of text ' if result.is_text else ''}in {config.num_micro_batches} micro-batches "
        "for each data-parallel rank"
    ]
    if config.lora is not None:
        lora, targets = config.lora, ", ".join(config.lora.targets)
        lines.append(f"  LoRA of rank {lora.rank}, scale {lora.scale:g}, on {targets}; all else is frozen")
    for name in SIDES:
        side = config.side(name)
        layout = (f"{dimension}={size}" for dimension, size in side.sizes.items() if size != 1)
        lines.append(f"  {name:9}  {' '.join((side.runtime, *layout, f'({count(side.world_size, "rank")})'))}")
    stage_titles = ("step 0", "compared", "difference", "tolerance", "largest in")
    stages = table("  {:14}  {:>8}  {:>10}  {:>9}  {}", [stage_titles, *(_stage_row(stage) for stage in comparison.stages)])
    lines += ["", *(line.rstrip() for line in stages)]
    activations = next(stage for stage in comparison.stages if stage.stage == "activations")
    if left_out := activations.not_compared:
        more = f" and {len(left_out) - 4} more" if len(left_out) > 4 else ""
        lines.append(f"  not compared, on one side only: {', '.join(left_out[:4])}{more}")
    if elsewhere := activations.ends_elsewhere:
        named = ", ".join(f"{each.name} ({each.measure} {each.amount:.1e})" for each in elsewhere[:4])
        more = f" and {len(elsewhere) - 4} more" if len(elsewhere) > 4 else ""
        lines.append(f"  ends elsewhere, what follows agrees: {named}{more}")
    number = "  {:>11}  {:>11}  {:>10}  {:>7}  {:>7}"
    columns = ("candidate", "difference", "floor", "alone")
    titles = ("step", "loss", *columns, "grad norm", *columns, "")
    steps = table("  {:>4}" + 2 * number + "{}", [titles, *(_step_row(step) for step in comparison.steps)])
    lines += ["", *(line.rstrip() for line in steps)]
    lines += [
        "",
        f"largest difference of the loss {comparison.max_loss_difference:.1e}, of the gradient norm "
        f"{comparison.max_grad_norm_difference:.1e}; the loss fell by {comparison.loss_fall:.1%}",
    ]
    if floor := comparison.largest_floor:
        lines.append(f"the reference from itself in another order: {floor[0]:.1e} and {floor[1]:.1e} (floor)")
    if alone := comparison.largest_alone:
        lines.append(f"steps that start from the same weights: {alone[0]:.1e} and {alone[1]:.1e} (alone)")
    if not comparison.loss_fall >= LEAST_LOSS_FALL:
        lines.append(
            f"that is less than {LEAST_LOSS_FALL:.0%}, so the later steps say little: take more steps or a larger lr"
        )
    if config.lr < LEAST_LR:
        lines.append(f"with lr below {LEAST_LR:.0e}, the weights' tolerance may hide a parameter in a wrong decay group")
    divergence = comparison.first_divergence
    lines.append("no divergence: all within the tolerances" if divergence is None else f"first divergence: {divergence}")
    return "\n".join(lines)


def as_json(result: ParityResult) -> dict[str, Any]:
    """What ``--json`` writes. Differences that are not finite are null."""
    config, comparison, divergence = result.config, result.comparison, result.comparison.first_divergence
    report = config.model_dump(
        include={"model", "dtype", "lr", "weight_decay", "seed", "lora", "num_sequences", "num_micro_batches", "device"}
    )
    report["num_tokens"] = result.num_tokens
    for name in SIDES:
        side = config.side(name)
        report[name] = {
            "runtime": side.runtime,
            "world_size": side.world_size,
            "layout": side.sizes,
            "options": side.options,
            "versions": result.versions[name],
        }
    report |= {
        "max_loss_rel_diff": comparison.max_loss_difference,
        "max_grad_norm_rel_diff": comparison.max_grad_norm_difference,
        "floor": _named(comparison.largest_floor),
        "alone": _named(comparison.largest_alone),
        "loss_fall": comparison.loss_fall,
        "first_divergence": None,
        "stages": [asdict(stage) for stage in comparison.stages],
        "steps": [_step(step) for step in comparison.steps],
    }
    if divergence is not None:
        place = {"stage": divergence.stage, "step": divergence.step, "alone": divergence.alone, "message": str(divergence)}
        report["first_divergence"] = place | asdict(divergence.difference)
    plain: dict[str, Any] = finite(report)
    return plain


def _step(step: StepComparison) -> dict[str, Any]:
    numbers = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(step.loss, step.grad_norm, strict=True)]
    return {
        "step": step.step,
        **dict(zip(SIDES, numbers, strict=True)),
        "loss_rel_diff": step.loss_difference.amount,
        "grad_norm_rel_diff": step.grad_norm_difference.amount,
        "loss_tolerance": step.loss_difference.tolerance,
        "grad_norm_tolerance": step.grad_norm_difference.tolerance,
        "floor": _named(step.floor and (step.floor[0].amount, step.floor[1].amount)),
        "alone": _named(step.alone and (step.alone[0].amount, step.alone[1].amount)),
    }


def _named(differences: tuple[float, float] | None) -> dict[str, float] | None:
    return differences and {"loss_rel_diff": differences[0], "grad_norm_rel_diff": differences[1]}


def _stage_row(stage: StageResult) -> tuple[str, ...]:
    largest = stage.largest
    amount = "missing" if largest.missing_from is not None else f"{largest.amount:.1e}"
    remarks = [
        largest.name,
        f"({largest})" if largest.missing_from is not None else "",
        f"({largest.measure})" if largest.measure != "relative difference" else "",
        "" if stage.first_over is None else "<- over",
    ]
    return stage.stage, str(stage.compared), amount, f"{largest.tolerance:.0e}", " ".join(filter(None, remarks))


def _step_row(step: StepComparison) -> tuple[str, ...]:
    cells, over = [str(step.step)], []
    parts = [("loss", step.loss, step.loss_difference), ("grad norm", step.grad_norm, step.grad_norm_difference)]
    for index, (name, one, difference) in enumerate(parts):
        floor, alone = (pair and pair[index] for pair in (step.floor, step.alone))
        others = ("" if each is None else f"{each.amount:.1e}" for each in (floor, alone))
        cells += [f"{one[0]:.6f}", f"{one[1]:.6f}", f"{difference.amount:.1e}", *others]
        over += [name] if difference.over else []
        over += [f"{name} alone"] if alone is not None and alone.over else []
    return (*cells, f"  <- {' and '.join(over)} over" if over else "")
