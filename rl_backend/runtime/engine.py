"""Engines of runtimes: the calls that PyTorch and Megatron answer differently."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend import contracts
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.parallel.groups import RankGroups
from rl_backend.parallel.shards import chunk
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.passes import PassRequest


class Engine[H: GuardedHandle](ABC):
    """The work behind the atoms of a :class:`~rl_backend.runtime.guarded.GuardedRuntime`, which has checked the handle."""

    groups: RankGroups

    def active(self) -> AbstractContextManager[None]:
        """Around every call of the engine, except while a stream of weights is read."""
        return nullcontext()

    def stream(self, weights: WeightStream) -> WeightStream:
        """A stream of weights that runs as calls of the engine do."""
        return weights

    @property
    @abstractmethod
    def is_source(self) -> bool:
        """Whether this is the rank of its replica that has outputs."""

    @abstractmethod
    def build(
        self, config: contracts.RuntimeConfig, name: str, head: contracts.Head, *, forward_only: bool, adaptable: bool
    ) -> H:
        """Builds the model of ``config.hf_path`` and loads its weights.

        Args:
            adaptable: LoRA tenants may be made of it, which is forward-only then.
        """

    @abstractmethod
    def run_passes(self, handle: H, request: PassRequest) -> contracts.ForwardResult:
        """Checks the data over all ranks, then runs it. An error in the middle of a backward pass sets ``broken``."""

    @abstractmethod
    def record_activations(self, handle: H, request: PassRequest) -> list[Mapping[str, Tensor]]:
        """Checks the data over all ranks, then runs it forward; see :meth:`~rl_backend.runtime.Runtime.activations`."""

    @abstractmethod
    def gather_weights(
        self, handle: H, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        """Checks the arguments, then returns the generator that gathers."""

    def shards(self, handle: H, dtype: torch.dtype | None) -> Iterator[contracts.WeightShard]:
        """As :meth:`~rl_backend.runtime.Runtime.export_shards`: each weight is gathered and its rows are dealt out evenly.

        An engine whose ranks hold one rectangle of each weight gives these instead, without communication.
        """

        def dealt_out(name: str, tensor: Tensor) -> contracts.WeightShard:
            rows = chunk(slice(0, tensor.shape[0]), dist.get_world_size(), dist.get_rank())
            return contracts.WeightShard(name, tuple(tensor.shape), (rows.start, *([0] * (tensor.dim() - 1))), tensor[rows])

        weights = self.stream(self.gather_weights(handle, dtype, None, None))
        return (dealt_out(name, tensor) for name, tensor in weights)

    @abstractmethod
    def parts(self, handle: H, dtype: torch.dtype | None) -> Iterator[contracts.WeightShard]:
        """As :meth:`~rl_backend.runtime.Runtime.export_shards` with ``held``."""

    @abstractmethod
    def shard_infos(self, handle: H, dtype: torch.dtype | None) -> tuple[contracts.TensorPart, ...]:
        """What :meth:`parts` gives on all ranks."""

    @abstractmethod
    def gather_gradients(self, handle: H, names: Collection[str] | None) -> WeightStream:
        """As :meth:`gather_weights` for the gradients, in float32."""

    @abstractmethod
    def training_state(self, handle: H) -> tuple[StateTensors, TrainingManifest]:
        """What a checkpoint holds."""

    @abstractmethod
    def load_training_state(self, handle: H, path: StateSource) -> TrainingManifest:
        """Restores a handle from ``path``; a forward-only one takes the weights and their version."""

    @abstractmethod
    def close(self) -> None:
        """Frees the process groups, once every model is released."""
