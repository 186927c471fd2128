"""The memory of the native runtime: its own model, laid out and run on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from rl_backend.contracts import NativeConfig, RuntimeConfig
from rl_backend.lab.plan.activations import Stage, StageMemory, measure_stage, most_in_flight
from rl_backend.lab.plan.memory import RankMemory, Workload
from rl_backend.lab.plan.shards import ParameterSize, ShardedStage, sync_bucket_bytes, weights_to_sync
from rl_backend.model import ModelStage
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.imagined import imagined_rank
from rl_backend.pipeline import Action, Kind, make_schedule
from rl_backend.primitive.tiles import logits_chunk_bytes
from rl_backend.runtime.native.build import build_module
from rl_backend.runtime.native.layout import ModelDescription, algorithm, describe_model, model_stages, schedule_name

MASTER_BYTES = torch.float32.itemsize
"""Of a parameter that is trained, its gradient, and each of Adam's two moments."""


@dataclass(frozen=True)
class RankStages:
    """The stages of one pipeline rank, and what a micro-batch takes on each."""

    sharded: Mapping[int, ShardedStage]
    measured: Mapping[int, StageMemory]
    has_head: bool


def logits_chunk(model: ModelDescription, native: NativeConfig, workload: Workload) -> int:
    """Bytes of the largest chunk of logits on a rank that has the head."""
    if workload.head != "log_probs":
        return 0
    return logits_chunk_bytes(
        -(-workload.micro_batch_tokens // native.parallel.cp),
        -(-model.hf_config["vocab_size"] // native.parallel.tp),
        native.log_prob_chunk_tokens,
        calculate_entropy=workload.calculate_entropy,
    )


def native_memory(config: RuntimeConfig, num_ranks: int, workload: Workload) -> tuple[list[RankMemory], int]:
    """Memory of each pipeline rank, and the bytes of a weight sync. ``check_config`` has passed.

    Raises:
        BatchError: a number of micro-batches that the pipeline schedule does not take.
        ConfigError: a ``byte_budget`` smaller than the largest tensor.
    """
    native = config.options(NativeConfig)
    model = describe_model(config.hf_path, native, workload.head)
    actions = rank_actions(native, workload.num_micro_batches)
    accumulates = workload.num_micro_batches > 1 or schedule_name(native) is not None
    ranks = [rank_stages(model, native, rank, num_ranks, workload) for rank in range(native.parallel.pp)]
    parameters = whole_parameters(ranks)
    weights = weights_to_sync(model.weight_names, parameters, getattr(torch, workload.sync_dtype))
    bucket = sync_bucket_bytes(weights, workload.byte_budget, num_ranks)
    found = []
    for pipeline_rank, stages in enumerate(ranks):
        sharded = list(stages.sharded.values())
        held, trained = sum(stage.held for stage in sharded), sum(stage.held_and_trained for stage in sharded)
        # Reduced in the last backward pass of a step, or layer by layer in the only one.
        unreduced = sum(stage.gathered(all_at_once=accumulates, trained=True) for stage in sharded)
        optimizer = 2 * held * MASTER_BYTES + sum(len(stage.parameters) for stage in sharded) * torch.float32.itemsize
        found.append(
            RankMemory(
                pipeline_rank=pipeline_rank,
                weights=held * MASTER_BYTES,
                gradients=trained * MASTER_BYTES,
                optimizer=optimizer,
                undo=held * MASTER_BYTES + optimizer + trained * MASTER_BYTES if native.post_validation else 0,
                unreduced_gradients=unreduced * int(getattr(torch, native.reduce_dtype).itemsize),
                gathered_parameters=_gathered(native, sharded),
                logits_chunk=logits_chunk(model, native, workload) if stages.has_head else 0,
                sync_bucket=bucket,
                **most_in_flight(actions[pipeline_rank], stages.measured)._asdict(),
            )
        )
    return found, sum(weight.nbytes for weight in weights)


def rank_actions(native: NativeConfig, num_micro_batches: int) -> list[list[Action]]:
    """What each pipeline rank does in a training pass."""
    name, parallel = schedule_name(native), native.parallel
    if name is None:
        # One micro-batch after the other, on a stage that is the whole model.
        passes = (Kind.FORWARD, Kind.BACKWARD)
        return [[Action(kind, 0, micro_batch) for micro_batch in range(num_micro_batches) for kind in passes]]
    schedule = make_schedule(name, parallel.pp, num_micro_batches, stages_per_rank=parallel.vpp)
    return [list(actions) for actions in schedule.actions]


def rank_stages(
    model: ModelDescription, native: NativeConfig, pipeline_rank: int, num_ranks: int, workload: Workload
) -> RankStages:
    """Lays out the stages of the first rank of ``pipeline_rank``, whose shards are as large as any, and runs each."""
    parallel = native.parallel
    schedule = algorithm(native)
    splits_backward = schedule is not None and schedule.splits_backward
    sharded: dict[int, ShardedStage] = {}
    measured: dict[int, StageMemory] = {}
    batch = workload.micro_batch()
    with imagined_rank(parallel, pipeline_rank * (num_ranks // parallel.pp), num_ranks) as groups:
        parts: Mapping[int, ModelStage | None] = model_stages(model.family, model.architecture, native, pipeline_rank) or {
            0: None
        }
        # A rank that is the only one of its job, and computes in the dtype of its parameters, is left without FSDP.
        alone = replace(groups, world_group=_alone())
        as_they_are = native.replace(param_dtype="float32", reduce_dtype="float32")
        for number, part in parts.items():
            plain = _build(model, part, as_they_are, alone)
            sharded[number] = ShardedStage.of(_build(model, part, native, groups), plain)
            # What FSDP would do to its parameters.
            plain = plain.to(getattr(torch, native.param_dtype))
            hidden_size = None if part is None or part.first else model.hf_config["hidden_size"]
            measured[number] = measure_stage(Stage(plain, hidden_size, splits_backward), batch, groups)
    return RankStages(sharded, measured, any(part is None or part.last for part in parts.values()))


def _build(model: ModelDescription, part: ModelStage | None, native: NativeConfig, groups: ParallelGroups) -> nn.Module:
    settings = model.settings._replace(stage=part)
    return build_module(model.family, model.architecture, settings, groups, native, forward_only=False)


def _alone() -> dist.ProcessGroup:
    mine = dist.new_group([dist.get_rank()])
    assert isinstance(mine, dist.ProcessGroup), "this rank is in it"
    return mine


def whole_parameters(ranks: list[RankStages]) -> dict[str, ParameterSize]:
    """Parameters of all stages."""
    return {name: size for rank in ranks for stage in rank.sharded.values() for name, size in stage.parameters.items()}


def _gathered(native: NativeConfig, stages: list[ShardedStage]) -> int:
    """All stages of the rank when nothing is freed between passes, otherwise the one that runs."""
    size = getattr(torch, native.param_dtype).itemsize
    if not native.reshard_after_forward:
        return sum(stage.gathered(all_at_once=True) for stage in stages) * int(size)
    return max(stage.gathered(all_at_once=False) for stage in stages) * int(size)
