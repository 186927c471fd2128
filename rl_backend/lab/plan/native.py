"""The memory of the native runtime: its own model, laid out and run on the meta device."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import (
    TARGET_IDS,
    NativeConfig,
    PackedBatch,
    RuntimeConfig,
    TensorInfo,
    WeightName,
    export_dtype,
    stored_tensors,
    text_config,
)
from rl_backend.contracts.lora import ENGINE_RANKS, LoRAConfig, engine_slots
from rl_backend.data.prefixes import SHORTEST_RUN, shared_prefixes
from rl_backend.lab.plan.memory import PassMemory, RankMemory, ShardedStage, Workload
from rl_backend.lora.modules import AdaptedModule, modules_of_rank, require_trainable, select_modules
from rl_backend.lora.rows import TenantRows, factors_of_rank, lay_out_row
from rl_backend.model import ModelInput, ModelStage
from rl_backend.parallel.groups import META, ParallelGroups, fake_rank
from rl_backend.pipeline import Action, Kind, make_schedule
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.backward import put_off_weight_gradients
from rl_backend.primitive.float32 import round_parameters
from rl_backend.primitive.log_prob import IGNORE_LABEL, logits_chunk_bytes
from rl_backend.runtime.export_stream import plan_buckets
from rl_backend.runtime.native.adapters import held_modules
from rl_backend.runtime.native.build import build_module
from rl_backend.runtime.native.export import sharded_weights
from rl_backend.runtime.native.forward_backward import RankBatch, lay_out
from rl_backend.runtime.native.layout import (
    ModelDescription,
    TensorLayout,
    describe_model,
    model_stages,
    schedule_name,
    splits_backward,
    why_unshared,
)


class StageMemory(NamedTuple):
    """Bytes of one micro-batch on one stage, without parameters and their gradients.

    Attributes:
        kept: from the forward pass until the backward pass.
        put_off: from a backward pass for the inputs until that for the weights; 0 where the two are one.
        forward_peak, backward_peak: the most at one time in each pass, what is kept included.
        evaluation_peak: the most in a forward pass that no backward pass follows.
        flops: floating-point operations of both passes, as :class:`LiveBytes` counts them.
    """

    kept: int
    put_off: int
    forward_peak: int
    backward_peak: int
    evaluation_peak: int
    flops: int = 0


def measure_stage(
    module: nn.Module,
    batch: PackedBatch,
    groups: ParallelGroups,
    hidden_size: int | None,
    *,
    splits_backward: bool,
    shares_prefixes: bool = False,
    tenant: TenantRows | None = None,
) -> StageMemory:
    """Runs ``batch``, which is on the CPU, forward and backward on this rank of ``groups``.

    Args:
        module: on the meta device, in the dtype that it computes in, not sharded by FSDP; keeps no gradients from here on.
        hidden_size: of what the stage before puts out; None for the first stage.
        splits_backward: into a pass for the inputs and one for the weights.
        shares_prefixes: tokens with which several sequences begin are computed once.
        tenant: on the meta device, a LoRA tenant that all tokens belong to; parameters are frozen then.
    """

    def runs(sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        return () if tenant is None else (tenant.run(0, sum(sequence_rows), None),)

    tree = shared_prefixes(batch, replays=False) if shares_prefixes else None
    on_cpu = lay_out(batch, replace(groups, device=torch.device("cpu")), 1, runs=runs, trains_second=True, tree=tree)
    layout, inputs = on_cpu.layout, on_cpu.inputs
    if TARGET_IDS in batch.token_fields:
        # The meta device knows no labels, and would make logits of all tokens.
        wanted = (inputs.labels != IGNORE_LABEL).nonzero().squeeze(1)
        of_rows = wanted if inputs.of_rows is None else inputs.of_rows[wanted]
        inputs = inputs._replace(labels=inputs.labels[wanted], of_rows=of_rows, head_adapters=runs([len(wanted)]))
    rank_batch = RankBatch(
        tree_map_only(Tensor, lambda tensor: tensor.to(META), inputs),
        None if layout is None else replace(layout, places=layout.places.to(META)),
        None if on_cpu.of_tokens is None else on_cpu.of_tokens.to(META),
    )
    parameters = list(module.parameters())
    trained = [each for each in parameters if each.requires_grad]
    # A weight's gradient is dropped as soon as it is complete, as FSDP does that reduces it.
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
    of_tenant = [] if tenant is None else [tenant.weights, tenant.gradients]
    known = [*parameters, *of_tenant, *(value for value in rank_batch.inputs if isinstance(value, Tensor))]
    with torch.no_grad(), LiveBytes(known) as live:
        _forward(module, hidden_size, rank_batch, groups)
        evaluation_peak = live.peak
    if not trained and tenant is None:
        return StageMemory(0, 0, 0, 0, evaluation_peak)
    with LiveBytes(known) as live:
        inputs, outputs = _forward(module, hidden_size, rank_batch, groups)
        kept, forward_peak = live.live, live.peak
        live.peak = live.live
        put_off = 0
        with put_off_weight_gradients() if splits_backward else nullcontext() as gradients:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
        if gradients is not None:
            del inputs, outputs
            put_off = live.live
            gradients.compute()
        return StageMemory(kept, put_off, forward_peak, live.peak, evaluation_peak, live.flops)


def _forward(
    module: nn.Module, hidden_size: int | None, rank_batch: RankBatch, groups: ParallelGroups
) -> tuple[ModelInput, list[Tensor]]:
    """Input of the stage, and what a backward pass starts from."""
    inputs = rank_batch.inputs
    if hidden_size is not None:
        rows = inputs.input_ids.shape[0] // groups.tp_group.size()
        hidden = torch.empty(rows, hidden_size, dtype=next(module.parameters()).dtype, device=META)
        inputs = inputs._replace(hidden=hidden.requires_grad_(torch.is_grad_enabled()))
    output = module(inputs)
    if isinstance(output, Tensor):
        return inputs, [output]
    return inputs, [value for value in rank_batch.outputs(output, groups) if value is not None]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def most_in_flight(actions: Iterable[Action], stages: Mapping[int, StageMemory]) -> PassMemory:
    """The moment of one rank's actions when the most is needed."""
    kept = flops = 0
    # What is kept for backward passes, and what the pass that runs then takes beyond what it keeps.
    most = (0, 0)
    for action in actions:
        memory = stages.get(action.stage)
        if memory is None:
            continue
        if action.kind is Kind.FORWARD:
            flops += memory.flops
            most = max(most, (kept + memory.kept, memory.forward_peak - memory.kept), key=sum)
            kept += memory.kept
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            most = max(most, (kept, memory.backward_peak - memory.kept), key=sum)
            kept += (memory.put_off if action.kind is Kind.BACKWARD_INPUT else 0) - memory.kept
        elif action.kind is Kind.BACKWARD_WEIGHT:
            kept -= memory.put_off
    return PassMemory(
        activations=most[0],
        workspace=most[1],
        evaluation_workspace=max(memory.evaluation_peak for memory in stages.values()),
        kept_per_micro_batch={number: memory.kept for number, memory in stages.items()},
        flops=flops,
    )


_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    # Of (..., N, N) and (..., N, M): a multiplication and an addition for each element below or on the diagonal.
    torch.ops.aten.linalg_solve_triangular: lambda matrix, *_, out_val, **__: out_val.numel() * matrix.shape[-1],
    torch.ops.rl_backend.attend_on_meta: lambda query, value, products, **_: 2 * products,
}


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside of it, until nothing refers to them any more; not those of ``known``.

    Attributes:
        live: bytes that exist now.
        peak: the most that existed at one time, since the start or since this was set to ``live``.
        flops: floating-point operations, two for a multiplication and an addition, of what ``torch.utils.flop_counter``
            knows (products of matrices, convolutions, attention kernels) and of triangular systems.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.flops = 0
        self._known = [_storage(tensor) for tensor in known]
        self._held = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(_storage(leaf))
        formula = _FLOPS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=result))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._held:
            return
        nbytes = storage.nbytes()
        self._held.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._held.discard(key)
        self.live -= nbytes


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


# Of a parameter that is trained, its gradient, and each of Adam's two moments.
MASTER_BYTES = torch.float32.itemsize


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
) -> tuple[list[RankMemory], Sequence[TensorInfo], Callable[[], list[int]]]:
    """Memory of each pipeline rank, the tensors of a weight sync, and what counts the bytes of them that each rank sends;
    raises as ``make_plan``.
    """
    native = config.options(NativeConfig)
    model = describe_model(config.hf_path, native, workload.head)
    actions = rank_actions(native, workload.num_micro_batches)
    accumulates = accumulates_whole(native, workload)
    ranks = [rank_stages(model, native, rank, num_ranks, workload) for rank in range(native.parallel.pp)]
    weights = weights_to_sync(model, ranks, workload)
    bucket = sync_bucket_bytes(weights, workload.byte_budget, num_ranks)
    # A model that is not trained is kept as it is computed with.
    param_dtype: torch.dtype = getattr(torch, native.param_dtype)
    kept_dtype = param_dtype if workload.tenants else torch.float32
    found = []
    for stages, passes, tenant in zip(ranks, actions, tenants_of(ranks, workload), strict=True):
        sharded = list(stages.sharded.values())
        parameters = [size for stage in sharded for size in stage.parameters.values()]
        trained = sum(size.held for size in parameters if size.trained)
        # Reduced in the last backward pass of a step; or layer by layer in the only one, or in each, of one stage at a time.
        waiting = [stage.gathered(all_at_once=accumulates, trained=True) for stage in sharded]
        unreduced = sum(waiting) if accumulates else max(waiting)
        optimizer = 2 * trained * MASTER_BYTES + sum(size.trained for size in parameters) * torch.float32.itemsize
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
    return found, weights, partial(sent_by_rank, model, layouts_of(ranks), num_ranks, workload.sync_dtype)


def tenants_of(ranks: Sequence[RankStages], workload: Workload) -> list[TenantRows]:
    """What each pipeline rank has of a LoRA tenant: nothing where the model itself is trained.

    Raises :class:`ConfigError` for targets that this model does not have.
    """
    kinds = {name: module.kind for rank in ranks for name, module in rank.adaptable.items()}
    modules = select_modules(workload.lora, kinds) if workload.tenants else ()
    if workload.tenants:
        require_trainable(workload.lora, modules, kinds)
    return [_tenant(workload.lora, modules_of_rank(modules, rank.adaptable)) for rank in ranks]


def accumulates_whole(native: NativeConfig, workload: Workload) -> bool:
    """Whether gradients of whole parameters are kept from one micro-batch to the next, where they are sharded at all."""
    return native.reduce_gradients == "once" and (workload.num_micro_batches > 1 or schedule_name(native) is not None)


def layouts_of(ranks: Sequence[RankStages]) -> dict[str, TensorLayout]:
    """Of each parameter, by its name in the module."""
    return {
        name: TensorLayout(size.layout, torch.float32, size.in_float32)
        for rank in ranks
        for stage in rank.sharded.values()
        for name, size in stage.parameters.items()
        if size.layout is not None
    }


def why_prompts_are_repeated(model: ModelDescription, native: NativeConfig, workload: Workload) -> str:
    """What keeps a micro-batch from having each prompt once; empty where nothing does."""
    if workload.tenants:
        # They share what is in a micro-batch, which is planned by whole sequences.
        return f"tenants={workload.tenants}"
    if workload.prompt_length < SHORTEST_RUN:
        return f"prompt_length={workload.prompt_length}, below {SHORTEST_RUN}"
    return why_unshared(model.family, model.architecture, native)


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
    """Lays out the stages of a pipeline rank, and runs each."""
    parallel = native.parallel
    splits = splits_backward(native)
    sharded: dict[int, ShardedStage] = {}
    measured: dict[int, StageMemory] = {}
    adaptable: dict[str, AdaptedModule] = {}
    names = model.weight_names if workload.tenants else None
    shares = not why_prompts_are_repeated(model, native, workload)
    batch = workload.micro_batch(shares_prompts=shares)
    # The first of its ranks: its shards are as large as any.
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
                plain, batch, groups, hidden_size, splits_backward=splits, shares_prefixes=shares, tenant=tenant
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


def _tenant(lora: LoRAConfig, modules: Sequence[AdaptedModule]) -> TenantRows:
    placed, sections = lay_out_row(factors_of_rank(modules, lora, {each.name: each.kind for each in modules}))
    row, moment = (torch.empty(placed[-1].stop if placed else 0, device=META) for _ in range(2))
    gradients, num_steps = torch.empty_like(row), torch.empty((), device=META)
    return TenantRows(lora, placed, sections, row, gradients, moment, torch.empty_like(moment), num_steps)


def engine_slot_bytes(weights: Sequence[TensorInfo], config: RuntimeConfig, workload: Workload) -> int:
    """What a vLLM engine takes for adapters (vLLM 0.30, ``lora/layers``)."""
    # A slot has both factors of every linear layer, and of embedding and head, whatever the tenants adapt. On a CPU there
    # are none for experts, routers and, of hybrid mixtures, embedding and head, which are counted all the same.
    text: Mapping[str, Any] = text_config(read_hf_config(config.hf_path))
    ends = ("embed_tokens.weight", "lm_head.weight")
    sizes: int = sum(sum(weight.shape) for weight in weights if len(weight.shape) == 2 and not weight.name.endswith(ends))
    sizes += 2 * (text["vocab_size"] + text["hidden_size"])
    # Queries, keys and values of gated DeltaNet are one weight, and each has a copy of A.
    sizes += sum(2 * weight.shape[1] for weight in weights if weight.name.endswith(".linear_attn.in_proj_qkv.weight"))
    rank = next((rank for rank in ENGINE_RANKS if rank >= workload.lora.rank), workload.lora.rank)
    slots = engine_slots(workload.tenants, getattr(config.backend_cfg, "device", "auto"))
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


def sent_by_rank(model: ModelDescription, layouts: Mapping[str, TensorLayout], num_ranks: int, sync_dtype: str) -> list[int]:
    """Bytes of ``export_shards(held=True)``."""
    dtype, sent = getattr(torch, sync_dtype), [0] * num_ranks
    for weight in sharded_weights({}, model.weight_names, layouts, dtype=dtype, only=None):
        for part in weight.parts:
            sent[part.rank] += part.numel * weight.dtype.itemsize
    return sent


def sync_bucket_bytes(weights: Sequence[TensorInfo], byte_budget: int | None, world_size: int) -> int:
    """What ``export_weights`` of the native runtime takes on a rank; refuses a budget below the largest tensor."""
    buckets = plan_buckets(weights, byte_budget)
    largest = max(weight.nbytes for weight in weights)
    # A single rank only changes the dtype.
    if world_size == 1:
        return largest
    # Beside the full tensors of a bucket: padding of at most an eighth, what the rank sends, and the tensor put together.
    bucket = max(sum(weight.nbytes for weight in each) for each in buckets)
    return bucket + bucket // 8 + bucket // world_size + largest
