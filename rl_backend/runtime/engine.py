"""The engine of a guarded runtime: the calls that native PyTorch and Megatron answer differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.training_state import StateTensors
from rl_backend.contracts import (
    ForwardResult,
    Head,
    LossFn,
    PackedBatch,
    RuntimeConfig,
    StepResult,
    TensorInfo,
)
from rl_backend.runtime.export_stream import WeightStream
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.router_replay import RouterReplay, require_routers


class Engine[H: GuardedHandle](ABC):
    """The work behind the atoms. :class:`~rl_backend.runtime.guarded.GuardedRuntime` has checked the handle before each."""

    def _engine(self) -> AbstractContextManager[None]:
        """Around every call of the engine, except while a stream of weights is read."""
        return nullcontext()

    def _stream_in_engine(self, stream: WeightStream) -> WeightStream:
        """A stream of weights that runs as calls of the engine do."""
        return stream

    @abstractmethod
    def _is_source(self) -> bool:
        """Whether this is the rank of its replica that has outputs."""

    @abstractmethod
    def _build(self, config: RuntimeConfig, name: str, head: Head, *, forward_only: bool) -> H:
        """Builds the model of ``config.hf_path`` and loads its weights."""

    @abstractmethod
    def _require_schedulable(self, handle: H, num_micro_batches: int, *, forward_only: bool) -> None:
        """Raises :class:`BatchError` for a number of micro-batches that the engine cannot run."""

    @abstractmethod
    def _run_passes(
        self,
        handle: H,
        data: Sequence[PackedBatch],
        loss_fn: LossFn | None,
        *,
        forward_only: bool,
        router_replay: RouterReplay,
    ) -> ForwardResult:
        """Checks ``data`` over all ranks, then runs it. An error in the middle of a backward pass sets ``broken``."""

    @abstractmethod
    def _record_activations(self, handle: H, data: Sequence[PackedBatch]) -> list[Mapping[str, Tensor]]:
        """Runs checked micro-batches forward; see :meth:`~rl_backend.runtime.Runtime.activations`."""

    @abstractmethod
    def _drop_gradients(self, handle: H) -> None:
        """Drops all gradients, those in host memory too."""

    @abstractmethod
    def _step(self, handle: H) -> StepResult:
        """Clips and steps, or changes nothing."""

    @abstractmethod
    def _describe_weights(self, handle: H, dtype: torch.dtype | None) -> tuple[TensorInfo, ...]:
        """What :meth:`_gather_weights` yields. Not a collective."""

    @abstractmethod
    def _gather_weights(
        self, handle: H, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        """Checks the arguments, then returns the generator that gathers."""

    @abstractmethod
    def _gather_gradients(self, handle: H, names: Collection[str] | None) -> WeightStream:
        """As :meth:`_gather_weights` for the gradients, in float32."""

    @abstractmethod
    def _training_state(self, handle: H) -> tuple[StateTensors, TrainingManifest]:
        """What a checkpoint holds."""

    @abstractmethod
    def _load_training_state(self, handle: H, path: Path) -> TrainingManifest:
        """Restores a handle from ``path``; a forward-only one takes the weights and their version."""

    @abstractmethod
    def _close_groups(self) -> None:
        """Gives up the process groups, once no handle has tensors any more."""

    def _require_replayable(self, handle: H, router_replay: RouterReplay) -> None:
        """Raises :class:`UnsupportedError` for a model whose routes the engine cannot record or replay."""
        require_routers(router_replay, handle.routed_layers, handle.name)
