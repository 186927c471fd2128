"""The engine of the native runtime: PyTorch, on one or several ranks."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import (
    ForwardResult,
    Head,
    NativeConfig,
    RuntimeConfig,
    TensorPart,
    WeightShard,
)
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups, training_device
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.native.build import build_handle
from rl_backend.runtime.native.checkpoints import all_tensors, load_training_checkpoint, training_manifest
from rl_backend.runtime.native.export import export_gradients, export_shards, export_weights, shard_infos
from rl_backend.runtime.native.forward_backward import record_activations, run_micro_batches, run_pipeline
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import has_last_stage
from rl_backend.runtime.passes import PassRequest, check_micro_batches


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
