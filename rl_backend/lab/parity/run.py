"""A comparison from its configuration to its result."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import ConfigError
from rl_backend.lab.parity.compare import Comparison, compare
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, SideName, make_sequences, plan_batch
from rl_backend.lab.parity.differences import Tolerances
from rl_backend.lab.parity.processes import StartRank, run_ranks, start_rank
from rl_backend.lab.parity.record import SideRecord, merge_ranks

SIDES: tuple[SideName, ...] = ("reference", "candidate")


@dataclass(frozen=True)
class ParityResult:
    """A comparison and what it was of.

    Attributes:
        device: ``cpu`` or ``cuda``.
        num_tokens: of the batch.
        versions: side -> package -> version.
    """

    config: ParityConfig
    device: str
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
    device = _device(config)
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
            records[name] = record_side(config, name, device, Path(folder) / name)
        comparison = compare_sides(config, records["reference"], records["candidate"], tolerances)
        versions = {name: dict(record.versions) for name, record in records.items()}
    return ParityResult(config, device, sum(map(len, sequences)), comparison, versions)


def record_side(
    config: ParityConfig, name: SideName, device: str, folder: Path, start: StartRank = start_rank
) -> SideRecord:
    """Runs one side, each rank in a process of its own.

    Args:
        device: ``cpu`` or ``cuda``.
        folder: for the record's files; is made, and must outlive the record.
        start: starts the process of a rank.

    Raises:
        ParityError: as :func:`~rl_backend.lab.parity.processes.run_ranks`.
    """
    ranks = run_ranks(config, name, device, folder, start)
    return merge_ranks(ranks, plan_batch(config, config.side(name).data_parallel_size))


def compare_sides(config: ParityConfig, reference: SideRecord, candidate: SideRecord, tolerances: Tolerances) -> Comparison:
    """Compares two sides that trained on the model and batch of ``config``, whatever their layouts."""
    checkpoint = HFReader(config.model)
    return compare(reference, candidate, tolerances, required_modules(checkpoint.config, checkpoint.infos))


def required_modules(hf_config: Mapping[str, Any], stored_names: Collection[str]) -> tuple[str, ...]:
    """Paths of the layers and of the modules beside their list that have weights: the embedding and the last norm.

    The list is where the stored names are numbered, ``model.layers`` in ``model.layers.0.mlp.up_proj.weight``.

    Args:
        hf_config: ``config.json``, whose ``num_hidden_layers`` counts the layers.
        stored_names: of the tensors in the checkpoint.

    Raises:
        ConfigError: ``num_hidden_layers`` is no positive whole number, or the checkpoint has not as many layers.
    """
    count = hf_config.get("text_config", hf_config).get("num_hidden_layers")
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
