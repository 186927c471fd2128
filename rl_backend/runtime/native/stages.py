"""The part of a model that this rank of a pipeline has."""

from __future__ import annotations

from typing import Any

from rl_backend.contracts import ConfigError, NativeConfig
from rl_backend.model import ModelFamily, ModelStage
from rl_backend.pipeline.catalog import Algorithm, require_stages
from rl_backend.pipeline.schedule import split_layers


def schedule_name(config: NativeConfig) -> str | None:
    """The schedule of a pipeline; None where there is none: one rank with one stage, and no schedule asked for."""
    parallel = config.parallel
    if config.pipeline_schedule != "auto":
        return config.pipeline_schedule
    if parallel.vpp > 1:
        return "interleaved-1f1b"
    return "1f1b" if parallel.pp > 1 else None


def algorithm(config: NativeConfig) -> Algorithm | None:
    """How the schedule is made, or None without one.

    Raises:
        ConfigError: a number of stages per rank that the schedule does not have.
    """
    name = schedule_name(config)
    return None if name is None else require_stages(name, config.parallel.pp, config.parallel.vpp)


def micro_batch_multiple(config: NativeConfig) -> int:
    """A number that the schedule takes every multiple of as a number of micro-batches."""
    found = algorithm(config)
    if found is None:
        return 1
    return max(found.micro_batches_per_rank, int(found.whole_groups)) * config.parallel.pp or 1


def has_last_stage(config: NativeConfig, pp_rank: int) -> bool:
    """Whether the loss is computed on ``pp_rank``; with stages in the shape of a V that is the first rank."""
    found = algorithm(config)
    return found is None or found.ranks_of_stages(config.parallel.pp, config.parallel.vpp)[-1] == pp_rank


def model_stages(family: ModelFamily, architecture: Any, config: NativeConfig, pp_rank: int) -> dict[int, ModelStage]:
    """Number -> what is in it, of the stages that ``pp_rank`` has.

    Raises:
        ConfigError: layers that do not fit the stages, or layers for a pipeline that there is not.
    """
    parallel = config.parallel
    found = algorithm(config)
    if found is None or family.num_layers is None:
        if config.pipeline_layers is not None:
            raise ConfigError.of(
                "NativeConfig.pipeline_layers", config.pipeline_layers, "without a pipeline there are no stages"
            )
        return {}
    placement = found.ranks_of_stages(parallel.pp, parallel.vpp)
    layers = split_layers(family.num_layers(architecture), len(placement), config.pipeline_layers)
    last = len(placement) - 1
    return {
        stage: ModelStage(first=stage == 0, layers=layers[stage], last=stage == last)
        for stage, rank in enumerate(placement)
        if rank == pp_rank
    }
