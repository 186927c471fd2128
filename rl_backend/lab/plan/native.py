"""The memory of the native runtime: its own model, laid out and run on the meta device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import (
    NativeConfig,
    RuntimeConfig,
    TensorInfo,
    WeightName,
    export_dtype,
    stored_tensors,
    text_config,
)
from rl_backend.contracts.lora import ENGINE_RANKS, LoRAConfig, engine_slots
from rl_backend.lab.plan.activations import StageMemory, measure_stage, most_in_flight
from rl_backend.lab.plan.memory import RankMemory, ShardedStage, Workload
from rl_backend.lora.modules import AdaptedModule, modules_of_rank, select_modules
from rl_backend.lora.rows import TenantRows, factors_of, lay_out_row
from rl_backend.model import ModelStage
from rl_backend.parallel.fake_groups import META, fake_rank
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.pipeline import Action, Kind, make_schedule
from rl_backend.primitive.float32 import round_parameters
from rl_backend.primitive.log_prob import logits_chunk_bytes
from rl_backend.runtime.export_stream import plan_buckets
from rl_backend.runtime.native.adapters import held_modules
from rl_backend.runtime.native.build import build_module
from rl_backend.runtime.native.layout import ModelDescription, algorithm, describe_model, model_stages, schedule_name

MASTER_BYTES = torch.float32.itemsize
"""Of a parameter that is trained, its gradient, and each of Adam's two moments."""


@dataclass(frozen=True)
class RankStages:
    """The stages of one pipeline rank, what a micro-batch takes on each, and bytes of the largest chunk of logits.

    Attributes:
        adaptable: modules that LoRA tenants can adapt, by name; empty without tenants.
    """

    sharded: Mapping[int, ShardedStage]
    measured: Mapping[int, StageMemory]
    logits_chunk: int
    adaptable: Mapping[str, AdaptedModule]


def native_memory(
    config: RuntimeConfig, num_ranks: int, workload: Workload
) -> tuple[list[RankMemory], Sequence[TensorInfo]]:
    """Memory of each pipeline rank, and the tensors of a weight sync. ``check_config`` has passed.

    Raises:
        BatchError: a number of micro-batches that the pipeline schedule does not take.
        ConfigError: a ``byte_budget`` smaller than the largest tensor, or LoRA targets that the model does not have.
    """
    native = config.options(NativeConfig)
    model = describe_model(config.hf_path, native, workload.head)
    actions = rank_actions(native, workload.num_micro_batches)
    accumulates = workload.num_micro_batches > 1 or schedule_name(native) is not None
    ranks = [rank_stages(model, native, rank, num_ranks, workload) for rank in range(native.parallel.pp)]
    weights = weights_to_sync(model, ranks, workload)
    bucket = sync_bucket_bytes(weights, workload.byte_budget, num_ranks)
    kinds = {name: module.kind for rank in ranks for name, module in rank.adaptable.items()}
    modules = select_modules(workload.lora, kinds) if workload.tenants else ()
    # A model that is not trained is kept as it is computed with.
    param_dtype: torch.dtype = getattr(torch, native.param_dtype)
    kept_dtype = param_dtype if workload.tenants else torch.float32
    found = []
    for stages, passes in zip(ranks, actions, strict=True):
        sharded = list(stages.sharded.values())
        parameters = [size for stage in sharded for size in stage.parameters.values()]
        trained = sum(size.held for size in parameters if size.trained)
        # Reduced in the last backward pass of a step, or layer by layer in the only one.
        unreduced = sum(stage.gathered(all_at_once=accumulates, trained=True) for stage in sharded)
        optimizer = 2 * trained * MASTER_BYTES + sum(size.trained for size in parameters) * torch.float32.itemsize
        tenant = _tenant(workload.lora, modules_of_rank(modules, stages.adaptable))
        # All stages of the rank if nothing is freed between passes, else the largest: one runs at a time.
        whole = [stage.gathered_bytes(param_dtype, all_at_once=not native.reshard_after_forward) for stage in sharded]
        gathered = max(whole) if native.reshard_after_forward else sum(whole)
        found.append(
            RankMemory(
                weights=sum(stage.held_bytes(kept_dtype) for stage in sharded),
                gradients=trained * MASTER_BYTES,
                optimizer=optimizer,
                adapters=workload.tenants * tenant.nbytes,
                unreduced_gradients=unreduced * int(getattr(torch, native.reduce_dtype).itemsize),
                gathered_parameters=gathered,
                logits_chunk=stages.logits_chunk,
                sync_bucket=bucket,
                **vars(most_in_flight(passes, stages.measured)),
            )
        )
    return found, weights


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
    adaptable: dict[str, AdaptedModule] = {}
    names = model.weight_names if workload.tenants else None
    batch = workload.micro_batch()
    with fake_rank(parallel, pipeline_rank * (num_ranks // parallel.pp), num_ranks) as groups:
        stages = model_stages(model.family, model.architecture, native, pipeline_rank)
        parts: Mapping[int, ModelStage | None] = stages or {0: None}
        # A rank that is the only one of its job, and computes in the dtype of its parameters, is left without FSDP.
        mine = dist.new_group([dist.get_rank()])
        assert isinstance(mine, dist.ProcessGroup), "this rank is in it"
        alone = replace(groups, world_group=mine)
        as_they_are = native.replace(param_dtype="float32", reduce_dtype="float32", head_in_float32=False)
        for number, part in parts.items():
            plain = _build(model, part, as_they_are, alone, names)
            sharded[number] = ShardedStage.of(_build(model, part, native, groups, names), plain)
            # What FSDP would do to its parameters.
            round_parameters(plain, getattr(torch, native.param_dtype))
            hidden_size = None if part is None or part.first else text_config(model.hf_config)["hidden_size"]
            tenant = None
            if names is not None:
                held = held_modules([plain], names, groups)
                adaptable |= held
                adapted = [module for module in held.values() if workload.lora.selects(module.name, module.kind)]
                tenant = _tenant(workload.lora, adapted)
            measured[number] = measure_stage(
                plain, batch, groups, hidden_size, splits_backward=splits_backward, tenant=tenant
            )
    chunk = 0
    if workload.head == "log_probs" and any(part is None or part.last for part in parts.values()):
        chunk = logits_chunk_bytes(
            -(-workload.micro_batch_tokens // parallel.cp),
            -(-text_config(model.hf_config)["vocab_size"] // parallel.tp),
            native.log_prob_chunk_tokens,
            calculate_entropy=workload.calculate_entropy,
        )
    return RankStages(sharded, measured, chunk, adaptable)


def _build(
    model: ModelDescription,
    part: ModelStage | None,
    native: NativeConfig,
    groups: ParallelGroups,
    adapted_names: Mapping[str, WeightName] | None,
) -> nn.Module:
    settings, frozen = model.settings._replace(stage=part), adapted_names is not None
    return build_module(model.family, model.architecture, settings, groups, native, frozen, adapted_names)


def _tenant(lora: LoRAConfig, modules: Iterable[AdaptedModule]) -> TenantRows:
    """The rows of a LoRA tenant on one rank, without storage."""
    placed, sections = lay_out_row([each for module in modules for each in factors_of(module, lora)])
    row, moment = (torch.empty(placed[-1].stop if placed else 0, device=META) for _ in range(2))
    gradients, num_steps = torch.empty_like(row), torch.empty((), device=META)
    return TenantRows(lora, placed, sections, row, gradients, moment, torch.empty_like(moment), num_steps)


def engine_slot_bytes(weights: Sequence[TensorInfo], config: RuntimeConfig, workload: Workload) -> int:
    """What a vLLM engine takes for adapters: :func:`~rl_backend.contracts.lora.engine_slots` of the smallest rank it has.

    A slot has both factors of every linear layer, and of embedding and head, whatever the tenants adapt (vLLM 0.30,
    ``lora/layers``). On a CPU there are none for experts, routers and, of hybrid mixtures, embedding and head, which are
    counted all the same.
    """
    text: Mapping[str, Any] = text_config(read_hf_config(config.hf_path))
    ends = ("embed_tokens.weight", "lm_head.weight")
    sizes: int = sum(sum(weight.shape) for weight in weights if len(weight.shape) == 2 and not weight.name.endswith(ends))
    sizes += 2 * (text["vocab_size"] + text["hidden_size"])
    # Queries, keys and values of gated DeltaNet are one weight, and each has a copy of A.
    sizes += sum(2 * weight.shape[1] for weight in weights if weight.name.endswith(".linear_attn.in_proj_qkv.weight"))
    rank = next((rank for rank in ENGINE_RANKS if rank >= workload.lora.rank), workload.lora.rank)
    slots = engine_slots(workload.tenants, config.options(NativeConfig).device)
    return slots * rank * sizes * int(getattr(torch, workload.sync_dtype).itemsize)


def weights_to_sync(model: ModelDescription, ranks: Sequence[RankStages], workload: Workload) -> list[TensorInfo]:
    """What ``export_weights`` yields of a model."""
    dtype = getattr(torch, workload.sync_dtype)
    parameters = {name: size for rank in ranks for stage in rank.sharded.values() for name, size in stage.parameters.items()}
    return [
        TensorInfo.of(
            stored, parameters[key].whole[len(index) :], export_dtype(dtype, in_float32=parameters[key].in_float32)
        )
        for key, name in model.weight_names.items()
        for index, stored in stored_tensors(name)
    ]


def sync_bucket_bytes(weights: Sequence[TensorInfo], byte_budget: int | None, world_size: int) -> int:
    """What ``export_weights`` of the native runtime takes on a rank at one time.

    Beside the full tensors of a bucket: padding of at most an eighth, what the rank sends, and the tensor that is put
    together. A single rank only changes the dtype.

    Raises:
        ConfigError: a budget smaller than the largest tensor.
    """
    buckets = plan_buckets(weights, byte_budget)
    largest = max(weight.nbytes for weight in weights)
    if world_size == 1:
        return largest
    bucket = max(sum(weight.nbytes for weight in each) for each in buckets)
    return bucket + bucket // 8 + bucket // world_size + largest
