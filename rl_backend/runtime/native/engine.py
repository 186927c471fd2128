"""The engine of the native runtime: PyTorch, on one or several ranks."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import MOMENTS, WEIGHTS, StateTensors, TensorPieces
from rl_backend.contracts import (
    ForwardResult,
    Head,
    NativeConfig,
    RuntimeConfig,
    TensorPart,
    WeightShard,
    stored_tensors,
)
from rl_backend.parallel import fsdp
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups, training_device
from rl_backend.parallel.shards import local_region, local_tensor, owns
from rl_backend.runtime import checkpoints
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.native.build import build_handle
from rl_backend.runtime.native.export import export_gradients, export_shards, export_weights, shard_infos
from rl_backend.runtime.native.forward_backward import record_activations, run_micro_batches, run_pipeline
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import has_last_stage
from rl_backend.runtime.passes import PassRequest, check_micro_batches

_STEP = "step"


def load_training_checkpoint(handle: NativeHandle, path: StateSource) -> TrainingManifest:
    fsdp.reshard(handle.model)
    manifest, loaded = checkpoints.load_state(handle, path, all_tensors)
    _fill_copies(handle)
    if handle.optimizer is not None:
        for name, steps in _step_tensors(handle):
            steps.fill_(manifest.fewer_steps.get(name, manifest.optimizer_steps))
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        checkpoints.restore_random_state(loaded, handle.groups.device)
    return manifest


def all_tensors(handle: NativeHandle) -> StateTensors:
    """Weights, moments and random state as pieces of Hugging Face's tensors; of a forward-only handle the weights."""
    tensors: dict[str, Tensor | TensorPieces] = {}
    for prefix, name, tensor in _held_tensors(handle):
        original = handle.stage_copies.get(name, name)
        # Of a tied weight that this rank has twice, one is enough.
        if original != name and original in handle.parameters:
            continue
        tensors |= _pieces(handle, prefix, name, tensor)
    if handle.optimizer is not None:
        tensors |= checkpoints.random_state(handle.groups.device)
    return tensors


def training_manifest(handle: NativeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor. A collective; of use on rank 0."""
    group = handle.groups.host_group
    # AdamW counts steps for each parameter: one without a gradient does not take part.
    counts = dict(_step_tensors(handle))
    values = torch.stack(list(counts.values())).tolist() if counts else []  # one wait for the device
    mine = {name: int(count) for name, count in zip(counts, values, strict=True)}
    parts: list[dict[str, int]] = [{}] * dist.get_world_size(group)
    dist.gather_object(mine, parts if dist.get_rank(group) == 0 else None, group=group, group_dst=0)
    steps = {name: count for part in parts for name, count in part.items()}
    usual = Counter(steps.values()).most_common(1)[0][0] if steps else 0
    return checkpoints.training_manifest(
        handle,
        schedule_steps=handle.trainer.schedule.num_steps,
        optimizer_steps=usual,
        fewer_steps={name: count for name, count in steps.items() if count != usual},
    )


def _held_tensors(handle: NativeHandle) -> Iterator[tuple[str, str, Tensor]]:
    """(what its name in a checkpoint begins with, name of the parameter, tensor laid out as the parameter is)."""
    for name, parameter in handle.parameters.items():
        yield WEIGHTS, name, parameter
    if handle.optimizer is not None:
        state, trained = handle.optimizer.state_tensors(), handle.optimizer.parameters
        yield from ((prefix, name, state[f"{kind}.{name}"]) for name in trained for kind, prefix in MOMENTS.items())


def _pieces(handle: NativeHandle, prefix: str, name: str, tensor: Tensor) -> Iterator[tuple[str, TensorPieces]]:
    """Of a parameter that packs several tensors, those that this rank has a part of."""
    original = handle.stage_copies.get(name, name)
    parameter = handle.parameters[name]
    local, region = local_tensor(tensor), local_region(parameter)
    writes = owns(parameter) and original == name
    for index, stored in stored_tensors(handle.weight_names[original]):
        place = tuple(i - part.start for i, part in zip(index, region, strict=False))
        if all(part.start <= i < part.stop for i, part in zip(index, region, strict=False)):
            offsets, held = tuple(part.start for part in region[len(index) :]), local[place]
            pieces = {offsets: held} if held.numel() else {}
            yield prefix + stored, TensorPieces(parameter.shape[len(index) :], pieces, writes=writes)


def _step_tensors(handle: NativeHandle) -> Iterator[tuple[str, Tensor]]:
    """(first Hugging Face name, step count) of each parameter that is trained, copies too."""
    optimizer = handle.trainer
    state = optimizer.state_tensors()
    for name in optimizer.parameters:
        (_, stored), *_ = stored_tensors(handle.weight_names[handle.stage_copies.get(name, name)])
        yield stored, state[f"{_STEP}.{name}"]


def _fill_copies(handle: NativeHandle) -> None:
    # Where the original is on another rank, the copy has been read.
    held = {(kind, name): local_tensor(tensor) for kind, name, tensor in _held_tensors(handle)}
    for (kind, name), local in held.items():
        original = handle.stage_copies.get(name)
        if original is not None and original in handle.parameters:
            local.copy_(held[kind, original])


class NativeEngine(Engine[NativeHandle]):
    """PyTorch's answers to the calls behind the atoms; see :func:`native_runtime`."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._options = config.options(NativeConfig)
        self.groups: ParallelGroups = open_groups(
            self._options.parallel, training_device(self._options.device), self._options.waits_for_ranks
        )
        # Ranks of one replica must draw the same dropout, those of others different ones.
        torch.manual_seed(config.seed + self.groups.dp_rank)

    @property
    def is_source(self) -> bool:
        groups = self.groups
        return groups.token_group.rank() == 0 and has_last_stage(self._options, groups.pp_group.rank())

    def build(self, config: RuntimeConfig, name: str, head: Head, *, forward_only: bool, adaptable: bool) -> NativeHandle:
        return build_handle(
            config,
            self.groups,
            forward_only=forward_only,
            adaptable=adaptable,
            name=name,
            head=head,
            has_outputs=self.is_source,
        )

    def run_passes(self, handle: NativeHandle, request: PassRequest) -> ForwardResult:
        check_micro_batches(handle, request)
        request.begin()
        return run_pipeline(handle, request) if handle.stages else run_micro_batches(handle, request)

    def record_activations(self, handle: NativeHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
        check_micro_batches(handle, request)
        return record_activations(handle, request)

    def gather_weights(
        self, handle: NativeHandle, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        return export_weights(handle, dtype, byte_budget, names)

    def shards(self, handle: NativeHandle, dtype: torch.dtype | None) -> Iterator[WeightShard]:
        return export_shards(handle, dtype)

    def parts(self, handle: NativeHandle, dtype: torch.dtype | None) -> Iterator[WeightShard]:
        return (shard for shard in export_shards(handle, dtype) if shard.tensor.numel())

    def shard_infos(self, handle: NativeHandle, dtype: torch.dtype | None) -> tuple[TensorPart, ...]:
        return shard_infos(handle, dtype)

    def gather_gradients(self, handle: NativeHandle, names: Collection[str] | None) -> WeightStream:
        return export_gradients(handle, names)

    def training_state(self, handle: NativeHandle) -> tuple[StateTensors, TrainingManifest]:
        return all_tensors(handle), training_manifest(handle)

    def load_training_state(self, handle: NativeHandle, path: StateSource) -> TrainingManifest:
        return load_training_checkpoint(handle, path)

    def close(self) -> None:
        close_groups(self.groups)


type NativeRuntime = GuardedRuntime[NativeHandle]


def native_runtime(config: RuntimeConfig) -> NativeRuntime:
    """PyTorch alone: tensor, context, expert and pipeline parallelism, FSDP2 over the rest; gloo on a CPU, NCCL on CUDA.

    Building one seeds torch's generators of this process with ``seed + data-parallel rank``. Equal seeds, data and layout
    give equal results on a CPU; on CUDA call ``torch.use_deterministic_algorithms(True)`` as well.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """
    return GuardedRuntime(config, NativeEngine(config))
