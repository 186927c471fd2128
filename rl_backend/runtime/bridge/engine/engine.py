"""The engine of the bridge runtime: Megatron-Core."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from weakref import WeakKeyDictionary

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as streams
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import MOMENTS, RANDOM, WEIGHTS, StateTensors, TensorPieces
from rl_backend.contracts import (
    CheckpointError,
    ForwardResult,
    Head,
    RuntimeConfig,
    TensorPart,
    WeightShard,
    export_dtype,
)
from rl_backend.parallel.groups import training_device
from rl_backend.runtime import checkpoints
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.bridge.engine.forward_backward import record_activations, run_micro_batches
from rl_backend.runtime.bridge.engine.handle import BridgeHandle, build_handle
from rl_backend.runtime.bridge.engine.optimizer import ParameterState, num_steps, parameter_states, set_num_steps
from rl_backend.runtime.bridge.engine.sharding import (
    Block,
    HeldParts,
    StoredNames,
    export_parts,
    find_parts,
    model_blocks,
    part_infos,
    pieces_of,
)
from rl_backend.runtime.bridge.installed import quiet
from rl_backend.runtime.bridge.megatron.cpu import iterate_on_cpu, on_cpu
from rl_backend.runtime.bridge.megatron.groups import BridgeGroups, close_groups, open_groups
from rl_backend.runtime.bridge.model.conversion import Conversion
from rl_backend.runtime.bridge.passes.gradients import accumulated_gradients, gather_gradients
from rl_backend.runtime.checkpoints import Differs
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, start_stream
from rl_backend.runtime.guarded import GuardedRuntime
from rl_backend.runtime.passes import PassRequest, check_micro_batches


class BridgeEngine(Engine[BridgeHandle]):
    """Megatron-Core's answers to the calls behind the atoms."""

    def __init__(self, config: RuntimeConfig) -> None:
        options = config.options(BridgeConfig)
        # Where the rectangles of a model are, once a push has asked.
        self._parts: WeakKeyDictionary[BridgeHandle, HeldParts] = WeakKeyDictionary()
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

    def parts(self, handle: BridgeHandle, dtype: torch.dtype | None) -> Iterator[WeightShard]:
        parts = self._parts_of(handle)
        gathered = self.gather_weights(handle, dtype, None, parts.gathered)
        return iterate_on_cpu(self.groups.device, export_parts(handle, parts, dtype, gathered))

    def shard_infos(self, handle: BridgeHandle, dtype: torch.dtype | None) -> tuple[TensorPart, ...]:
        """See the base class. A collective over all ranks the first time that it is asked for a model."""
        return part_infos(handle, self._parts_of(handle), dtype)

    def _parts_of(self, handle: BridgeHandle) -> HeldParts:
        if handle not in self._parts:
            self._parts[handle] = find_parts(handle)
        return self._parts[handle]

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


_TRACKED = f"{RANDOM}megatron."


def all_tensors(handle: BridgeHandle) -> StateTensors:
    """Weights, moments and random state by name: pieces of Hugging Face's tensors; of a forward-only handle the weights."""
    # The float32 masters, of which a data-parallel rank has a part, stand for the weights.
    blocks = model_blocks(handle.models, _names(handle))
    if handle.optimizer is None:
        return _model_tensors(blocks, ())
    handle.finish_parameter_gathers()
    states = list(parameter_states(handle.optimizer.megatron))
    moments: dict[str, TensorPieces] = {}
    for name, prefix in MOMENTS.items():
        moments |= {prefix + key: pieces for key, pieces in pieces_of(blocks, _held(name, states)).items()}
    return {**_model_tensors(blocks, states), **moments, **_random_state(handle)}


def training_manifest(handle: BridgeHandle) -> TrainingManifest:
    """Everything of the training state that is not a tensor."""
    optimizer = handle.trainer
    return checkpoints.training_manifest(
        handle,
        private=_names(handle).private,
        schedule_steps=int(optimizer.scheduler.num_steps),
        optimizer_steps=num_steps(optimizer.megatron),
    )


def load_training_checkpoint(handle: BridgeHandle, path: StateSource) -> TrainingManifest:
    """Restores a handle from ``path``; a forward-only one takes the weights and their version. Gradients are left alone."""

    def require_even_steps(manifest: TrainingManifest) -> None:
        for name, steps in manifest.fewer_steps.items() if handle.optimizer is not None else ():
            raise CheckpointError.at(
                path,
                f"counts {steps} optimizer steps for {name} and {manifest.optimizer_steps} for most others, as it had no "
                "gradient in the rest; Megatron's Adam counts them for all together, so load it with backend='native'",
            )

    manifest, loaded = checkpoints.load_state(
        handle,
        path,
        all_tensors,
        check=require_even_steps,
        differs=_differs,
        earlier=lambda name: name.replace(_tracked_on(handle), _TRACKED, 1),
    )
    if handle.optimizer is not None:
        # Rounds masters to the dtype of the weights and gathers these.
        for state in parameter_states(handle.optimizer.megatron):
            # In float32 a master is a view of the weight.
            if state.parameter.dtype != torch.float32:
                state.parameter.detach().view(-1)[state.start : state.end].copy_(state.tensors["param"])
        for chunk in handle.chunks:
            chunk.start_param_sync(force_sync=True)
        set_num_steps(handle.optimizer.megatron, manifest.optimizer_steps)
        handle.optimizer.restore_schedule(manifest.schedule_steps)
        _restore_random_state(handle, loaded)
    return manifest


def _model_tensors(blocks: Sequence[Block], states: Sequence[ParameterState]) -> StateTensors:
    """Masters of what is trained; the rest as it is in the model."""
    whole = [each.tensor for each in blocks if not (states and each.tensor.requires_grad)]
    flat = {id(tensor): (0, tensor.numel(), tensor.detach().view(-1)) for tensor in whole}
    return {WEIGHTS + key: pieces for key, pieces in pieces_of(blocks, {**flat, **_held("param", states)}).items()}


def _held(name: str, states: Sequence[ParameterState]) -> dict[int, tuple[int, int, Tensor]]:
    """What the optimizer holds for this rank's part of each parameter, as :func:`pieces_of` takes it."""
    return {id(state.parameter): (state.start, state.end, state.tensors[name].detach()) for state in states}


def _random_state(handle: BridgeHandle) -> dict[str, Tensor]:
    """Under names that no two ranks share."""
    states = checkpoints.random_state(handle.groups.device)
    for name, state in streams.get_cuda_rng_tracker().get_states().items():
        # With graph-safe random numbers Megatron keeps generators instead of their states.
        states[_tracked(handle, name)] = state.get_state() if isinstance(state, torch.Generator) else state.clone()
    return states


def _restore_random_state(handle: BridgeHandle, tensors: StateTensors) -> None:
    checkpoints.restore_random_state(tensors, handle.groups.device)
    tracker = streams.get_cuda_rng_tracker()
    ours = tracker.get_states()
    for name, state in ours.items():
        saved = tensors.get(_tracked(handle, name))
        if isinstance(saved, Tensor):
            ours[name] = state.set_state(saved) if isinstance(state, torch.Generator) else saved
    tracker.set_states(ours)


def _tracked(handle: BridgeHandle, name: str) -> str:
    return f"{_tracked_on(handle)}{name}.{torch.distributed.get_rank()}"


def _tracked_on(handle: BridgeHandle) -> str:
    # A stream has other states on another kind of device, which has no use for them.
    return f"{_TRACKED}{handle.groups.device.type}."


def _differs(stream: str) -> Differs:
    # As model_parallel_cuda_manual_seed seeds Megatron's streams; torch's follow the data-parallel rank.
    if not stream.startswith(_TRACKED):
        return "replicas"
    known: dict[str, Differs] = {
        streams.get_data_parallel_rng_tracker_name(): "nowhere",
        streams.get_expert_parallel_rng_tracker_name(): "expert_ranks",
    }
    return known.get(stream.rpartition(".")[2], "tensor_ranks")


def _names(handle: BridgeHandle) -> StoredNames:
    return StoredNames(handle.converter.conversions, handle.models[0].config)
