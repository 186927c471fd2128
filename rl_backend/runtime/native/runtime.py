"""The native runtime: PyTorch as the engine of every atom, on one or several ranks."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import (
    ForwardResult,
    Head,
    NativeConfig,
    RuntimeConfig,
    WeightShard,
)
from rl_backend.parallel.groups import ParallelGroups, close_groups, open_groups, training_device
from rl_backend.runtime.batch_checks import check_micro_batches
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.guarded import AnyHandle, GuardedRuntime, guarded
from rl_backend.runtime.native import checkpoints, export
from rl_backend.runtime.native.activations import record_activations
from rl_backend.runtime.native.build import build_handle
from rl_backend.runtime.native.forward_backward import run_micro_batches
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.layout import has_last_stage
from rl_backend.runtime.native.pipeline import run_pipeline
from rl_backend.runtime.passes import PassRequest


class NativeEngine(Engine[NativeHandle]):
    """PyTorch's answers to the calls behind the atoms.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._options = config.options(NativeConfig)
        self.groups: ParallelGroups = open_groups(self._options.parallel, training_device(self._options.device))
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
        """See the base class; outputs are on the training device."""
        check_micro_batches(handle, request)
        request.begin()
        return run_pipeline(handle, request) if handle.stages else run_micro_batches(handle, request)

    def record_activations(self, handle: NativeHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
        check_micro_batches(handle, request)
        return record_activations(handle, request)

    def gather_weights(
        self, handle: NativeHandle, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        return export.export_weights(handle, dtype=dtype, byte_budget=byte_budget, only=names)

    def gather_gradients(self, handle: NativeHandle, names: Collection[str] | None) -> WeightStream:
        return export.export_gradients(handle, only=names)

    def training_state(self, handle: NativeHandle) -> tuple[StateTensors, TrainingManifest]:
        return checkpoints.all_tensors(handle), checkpoints.training_manifest(handle)

    def load_training_state(self, handle: NativeHandle, path: Path) -> TrainingManifest:
        return checkpoints.load_training_checkpoint(handle, path)

    def close(self) -> None:
        close_groups(self.groups)


class NativeRuntime(GuardedRuntime[NativeHandle]):
    """PyTorch alone: tensor, context, expert and pipeline parallelism, FSDP2 over the rest; gloo on a CPU, NCCL on CUDA.

    Building one seeds torch's generators of this process with ``seed + data-parallel rank``. Equal seeds, data and layout
    give equal results on a CPU; on CUDA call ``torch.use_deterministic_algorithms(True)`` as well.

    Raises:
        ConfigError: the world size, the device or the environment does not fit ``config``.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        super().__init__(config, NativeEngine(config))

    @guarded
    def export_shards(self, handle: AnyHandle, *, dtype: torch.dtype | None = None) -> Iterator[WeightShard]:
        """See the base class; this rank's part of every weight, without parts that a lower rank already holds."""
        return export.export_shards(cast(NativeHandle, handle), dtype)
