"""Engines of runtimes, and their models: the calls that PyTorch and Megatron answer differently."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend import contracts
from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts.atoms import Part
from rl_backend.parallel.groups import RankGroups
from rl_backend.parallel.shards import chunk
from rl_backend.runtime.adaptable import Adaptable
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.offload import Offload
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.router_replay import MODES, RouterReplay


class ScheduledOptimizer(Protocol):
    """An optimizer with a learning-rate schedule.

    Attributes:
        num_steps: optimizer steps taken.
        learning_rate: of the next step.
    """

    @property
    def num_steps(self) -> int: ...

    @property
    def learning_rate(self) -> float: ...

    def schedule_step(self) -> float:
        """Advances the schedules and returns the learning rate of the next step."""
        ...


@dataclass(eq=False, kw_only=True)
class GuardedHandle[O: ScheduledOptimizer](ABC):
    """One model of a :class:`~rl_backend.runtime.guarded.GuardedRuntime`: a :class:`~rl_backend.contracts.ModelHandle`.

    Attributes:
        owner: the runtime that it belongs to; None once it is closed.
        config: the runtime's, with the ``hf_path`` and optimizer of this model.
        hf_config: ``config.json``.
        vocab_size: ``vocab_size`` of ``config.json``.
        max_length: longest sequence, in tokens; None where the model sets no limit.
        optimizer: None for a forward-only handle.
        groups: device and process groups.
        adaptable: what LoRA tenants can adapt; None for a model that is trained itself.
        offload: where each part is.
        broken: why the handle cannot be used, empty when it can: a pass failed in the middle (until ``zero_grad``).
        damaged: why its weights cannot be trusted: a checkpoint failed in the middle of loading (until one loads).
        loaded: digest of the manifest of the checkpoint that it has loaded; empty where there is none.
    """

    name: str
    forward_only: bool
    head: contracts.Head
    config: contracts.RuntimeConfig
    groups: RankGroups
    hf_config: Mapping[str, Any]
    kept: Mapping[str, tuple[int, ...]]
    vocab_size: int
    max_length: int | None
    optimizer: O | None
    micro_batch_multiple: int = 1
    weight_version: int = 0
    base: contracts.ModelHandle | None = None
    lora_id: int = -1
    adaptable: Adaptable | None = None
    owner: object | None = None
    data_parallel_rank: int = field(init=False)
    data_parallel_size: int = field(init=False)
    offload: Offload = field(init=False)
    broken: str = ""
    damaged: str = ""
    loaded: str = ""

    def __post_init__(self) -> None:
        self.data_parallel_rank, self.data_parallel_size = self.groups.dp_rank, self.groups.dp_size
        self.offload = Offload(self.name, self.groups.device)

    @property
    @abstractmethod
    def routed_layers(self) -> contracts.RoutedLayers | None:
        """Its layers with experts; None where routes cannot be replayed."""

    @property
    def indexed_layers(self) -> contracts.IndexedLayers | None:
        """Its layers that choose keys; None where recorded keys cannot be replayed."""
        return None

    @abstractmethod
    def roots(self) -> Iterable[nn.Module]:
        """The modules that the model consists of on this rank."""

    @property
    @abstractmethod
    def weights(self) -> tuple[contracts.TensorInfo, ...]:
        """Every weight of the whole model in the dtype that it is kept in, in the order of export."""

    @property
    def in_float32(self) -> frozenset[str]:
        """Hugging Face names of weights that are computed with in float32, whatever the dtype of the rest."""
        return self.base.in_float32 if isinstance(self.base, GuardedHandle) else frozenset()

    @property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what a checkpoint holds, by which it knows the model."""
        return {info.name: info.shape for info in self.weights}

    @abstractmethod
    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        """This rank's tensors of each part that the handle has."""

    @abstractmethod
    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        """Raises :class:`BatchError` for a number of micro-batches that the engine cannot run."""

    def require_replayable(self, router_replay: RouterReplay) -> None:
        """Refuses routes of a model whose routers the engine cannot record or replay.

        Raises:
            BatchError: no such mode.
            UnsupportedError: nothing to record or replay, or the engine would route differently.
        """
        if router_replay not in MODES:
            raise contracts.BatchError(
                f"router_replay={router_replay!r}; expected one of {', '.join(MODES)}", router_replay=router_replay
            )
        if router_replay != "off" and (self.routed_layers is None or not self.routed_layers.layers):
            raise contracts.UnsupportedError(
                f"router_replay={router_replay!r}: {self.name} has no routers to record or replay; use 'off'",
                router_replay=router_replay,
            )

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drops all gradients, those in host memory too."""

    @abstractmethod
    def step(self, adam: contracts.AdamParams | None = None) -> contracts.StepResult:
        """Clips and steps, with the values of this step, or changes nothing."""

    def mark_incomplete(self) -> None:
        """After an error in the middle of a backward pass."""
        self.broken = "forward_backward raised an error in the middle, so its gradients are incomplete"

    def release(self) -> None:
        """Drops every tensor; the handle cannot be used again."""
        self.owner = self.optimizer = None
        self.offload = Offload(self.name, self.groups.device)

    @property
    def trainer(self) -> O:
        """The optimizer of a handle that is trained."""
        assert self.optimizer is not None, f"{self.name!r} is forward-only"
        return self.optimizer

    def require_trained(self, operation: str) -> None:
        """Raises :class:`HandleError` for a forward-only handle."""
        if self.optimizer is None:
            raise contracts.HandleError(
                f"{operation} on {self.name!r}, which is forward-only: it has no gradients and no optimizer; "
                "build it with build_model(forward_only=False)",
                handle=self.name,
                operation=operation,
            )

    @contextmanager
    def training(self, enabled: bool) -> Generator[None]:
        """Training or evaluation behaviour of every module inside; may nest."""
        roots = list(self.roots())
        before = [(module, module.training) for root in roots for module in root.modules()]
        for root in roots:
            root.train(enabled)
        try:
            yield
        finally:
            for module, was_training in before:
                module.training = was_training


class Engine[H: GuardedHandle](ABC):
    """The work behind the atoms of a :class:`~rl_backend.runtime.guarded.GuardedRuntime`, which has checked the handle.

    Attributes:
        groups: device and process groups.
    """

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
        """As :meth:`~rl_backend.runtime.Runtime.export_shards`.

        Here each weight is gathered and its rows are dealt out evenly; an engine whose ranks hold rectangles of the weights
        gives these, without communication.
        """

        def dealt_out(name: str, tensor: Tensor) -> contracts.WeightShard:
            rows = chunk(slice(0, tensor.shape[0]), dist.get_world_size(), dist.get_rank())
            return contracts.WeightShard(name, tuple(tensor.shape), (rows.start, *([0] * (tensor.dim() - 1))), tensor[rows])

        weights = self.stream(self.gather_weights(handle, dtype, None, None))
        return (dealt_out(name, tensor) for name, tensor in weights)

    @abstractmethod
    def gather_gradients(self, handle: H, names: Collection[str] | None) -> WeightStream:
        """As :meth:`gather_weights` for the gradients, in float32."""

    @abstractmethod
    def training_state(self, handle: H) -> tuple[StateTensors, TrainingManifest]:
        """What a checkpoint holds."""

    @abstractmethod
    def load_training_state(self, handle: H, path: Path) -> TrainingManifest:
        """Restores a handle from ``path``; a forward-only one takes the weights and their version."""

    @abstractmethod
    def close(self) -> None:
        """Frees the process groups, once every model is released."""
