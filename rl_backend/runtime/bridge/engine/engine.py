"""The engine of the bridge runtime: Megatron-Core."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import ForwardResult, Head, RuntimeConfig, export_dtype
from rl_backend.parallel.groups import training_device
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine.checkpoints import all_tensors, load_training_checkpoint, training_manifest
from rl_backend.runtime.bridge.engine.forward_backward import record_activations, run_micro_batches
from rl_backend.runtime.bridge.engine.handle import BridgeHandle, build_handle
from rl_backend.runtime.bridge.installed import quiet
from rl_backend.runtime.bridge.megatron.cpu import iterate_on_cpu, on_cpu
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups, close_groups, open_groups
from rl_backend.runtime.bridge.model.conversion import Conversion
from rl_backend.runtime.bridge.passes.gradients import accumulated_gradients, gather_gradients
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, start_stream
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.passes import PassRequest, check_micro_batches


class BridgeEngine(Engine[BridgeHandle]):
    """Megatron-Core's answers to the calls behind the atoms."""

    def __init__(self, config: RuntimeConfig) -> None:
        options = config.options(BridgeConfig)
        self.groups: BridgeGroups = open_groups(options.parallel, training_device(options.device), options.waits_for_ranks)
        try:
            with self.active():
                model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
            torch.manual_seed(config.seed + self.groups.dp_rank)
        except BaseException:
            self.close()
            raise

    def active(self) -> AbstractContextManager[None]:
        return on_cpu(self.groups.device)

    def stream(self, weights: WeightStream) -> WeightStream:
        return iterate_on_cpu(self.groups.device, weights)

    @property
    def is_source(self) -> bool:
        return self.groups.has_outputs

    def build(self, config: RuntimeConfig, name: str, head: Head, *, forward_only: bool, adaptable: bool) -> BridgeHandle:
        with quiet():
            return build_handle(config, self.groups, forward_only=forward_only, adaptable=adaptable, name=name, head=head)

    def run_passes(self, handle: BridgeHandle, request: PassRequest) -> ForwardResult:
        """See the base class. Losses and metrics are on the ranks of the last pipeline stage."""
        check_micro_batches(handle, request)
        request.begin()
        if request.forward_only:
            with torch.no_grad():
                return run_micro_batches(handle, request)
        if handle.forward_only:
            return run_micro_batches(handle, request)
        try:
            with accumulated_gradients(handle.chunks, has_gradients=handle.has_gradients):
                result = run_micro_batches(handle, request)
        except BaseException:
            handle.mark_incomplete()
            raise
        handle.has_gradients = True
        return result

    def record_activations(self, handle: BridgeHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
        """See the base class. With Transformer Engine some norms are a part of the projection behind them, and missing."""
        check_micro_batches(handle, request)
        with torch.no_grad():
            return record_activations(handle, request)

    def gather_weights(
        self, handle: BridgeHandle, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        """See the base class; by default in ``param_dtype``. What Megatron keeps as one parameter (query, key and value;
        gate and up) counts as one in the budget; copies while it is put together from its shards come on top.
        """
        buckets = plan_buckets(handle.converter.select("export_weights", names), byte_budget)
        handle.finish_parameter_gathers()
        return self._start_stream(handle, buckets, names, dtype)

    def gather_gradients(self, handle: BridgeHandle, names: Collection[str] | None) -> WeightStream:
        """See the base class. A weight that no loss reached has a gradient of zeros. Parameters are converted one by one."""
        handle.require_gradients("export_gradients")
        conversions = [each for each in handle.converter.select("export_gradients", names) if each.trained]
        gradients = gather_gradients(handle.chunks)
        return self._start_stream(handle, [[each] for each in conversions], names, torch.float32, replacements=gradients)

    def _start_stream(
        self,
        handle: BridgeHandle,
        buckets: Sequence[Sequence[Conversion]],
        names: Collection[str] | None,
        dtype: torch.dtype | None,
        *,
        replacements: Mapping[str, Tensor] | None = None,
    ) -> WeightStream:
        def gather(bucket: Sequence[Conversion]) -> Iterator[tuple[str, Tensor]]:
            for conversion in bucket:
                for name, tensor in handle.converter.convert(conversion, replacements):
                    if names is None or name in names:
                        exported = dtype and export_dtype(dtype, in_float32=conversion.in_float32)
                        yield name, tensor.to(exported or conversion.dtype)

        return start_stream(buckets, gather, self.groups.world_group, self.groups.device)

    def training_state(self, handle: BridgeHandle) -> tuple[StateTensors, TrainingManifest]:
        return all_tensors(handle), training_manifest(handle)

    def load_training_state(self, handle: BridgeHandle, path: StateSource) -> TrainingManifest:
        return load_training_checkpoint(handle, path)

    def close(self) -> None:
        close_groups(self.groups)


type BridgeRuntime = GuardedRuntime[BridgeHandle]


def bridge_runtime(config: RuntimeConfig) -> BridgeRuntime:
    """Megatron-Core's data, tensor, expert and pipeline parallelism, with models and weights by Megatron-Bridge.

    Building one seeds torch's generators of this process with ``seed + data-parallel rank`` and Megatron's, which differ
    by tensor- and expert-parallel rank, with ``seed``. A process has one layout: a second runtime must have the same.
    Raises :class:`ConfigError`: the world size, the device or the environment does not fit ``config``.
    """
    return GuardedRuntime(config, BridgeEngine(config))
