"""Transports: the interface, and what all have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
import torch

from actors.rollout.engines import EngineSet
from actors.sync.source import SourceContext, SourceHandle, SourceRanks
from actors.wire.segment import Segment, host_identity
from rl_backend.contracts import ConfigError, RLBackendError, TensorInfo, WeightManifest, WeightSyncError, dtype_from_name

type TransportName = Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"]

SOURCE_RANK = 0
"""The training rank that sends; the others take part in the export."""


@dataclass(frozen=True)
class PushPlan:
    """One push, as the source rank describes it before any weight moves.

    Attributes:
        key: of the :class:`~actors.sync.push.WeightSync`; ranks keep its buffers and connections under it.
        handle: reference to the model in the training group.
        dtype: dtype of the weights sent.
        byte_budget: passed to ``export_weights``.
        infos: the tensors, in order, without offsets or digests.
        node_id: Ray's, of the node that the source rank runs on.
        host: see :func:`~actors.wire.segment.host_identity`.
        device_ids: UUIDs of the ranks' CUDA devices; empty when any rank is on a CPU.
        kept: as :class:`~rl_backend.contracts.WeightManifest` has them.
    """

    key: str
    handle: Any
    dtype: str
    byte_budget: int | None
    version: int
    infos: tuple[TensorInfo, ...]
    node_id: str
    host: str
    device_ids: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def manifest(self) -> WeightManifest:
        """Version, names, shapes and dtypes; no digests."""
        return WeightManifest(version=self.version, tensors=self.infos, kept=self.kept)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


@dataclass(frozen=True)
class Staged:
    """Weights that wait in shared memory.

    Attributes:
        manifest: with offsets and digests.
        segments: engine -> the segment to load from.
        key: under which engines have checked parts of it already; empty where none has.
    """

    manifest: WeightManifest
    segments: Mapping[int, Segment]
    key: str = ""


class Transport(ABC):
    """Moves weights from the ranks of a training group to the engines of a rollout group."""

    name: str

    @abstractmethod
    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        """Raises :class:`~rl_backend.contracts.UnsupportedError` when the transport cannot serve these ranks and engines."""

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:  # noqa: B027, most transports keep something
        """Frees what the transport keeps in ranks and engines."""


class StagedTransport(Transport):
    """Brings the weights to a buffer beside each engine, where they are verified before any is loaded."""

    @abstractmethod
    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        """Fills a staging segment on the host of every living engine."""


class StreamingTransport(Transport):
    """Loads the weights bucket by bucket as they arrive; each bucket is verified before it is loaded."""

    kills_abandoned = False
    """Whether an engine may wait for ever for a sender that failed, so its process must be ended."""

    @abstractmethod
    def connect(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> None:
        """Brings ranks and living engines together; called before every push."""

    @abstractmethod
    def reconnect(self) -> None:
        """Another push has reached the engines since: they receive from that one, until :meth:`connect`."""

    @abstractmethod
    def send(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> dict[str, Any]:
        """Sends all weights; returns the last message for every engine's ``update``, by which it confirms them."""

    def stream(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> dict[int, Any]:
        """Updates every engine from ``begin_update`` to ``finish_update``; each engine's outcome.

        An engine whose update began and did not end is dirty, even when the trainer or another engine failed.
        """
        self.connect(plan, train, rollout)
        began = rollout.call("begin_update")
        failed = {engine: outcome for engine, outcome in began.items() if isinstance(outcome, RLBackendError)}
        begun = [engine for engine in began if engine not in failed]
        if failed:
            reason = f"another engine could not begin: {next(iter(failed.values()))}"
            return {**failed, **rollout.abandon(begun, reason, kill=False)}
        try:
            last_message = self.send(plan, train, rollout)
        except BaseException as error:
            rollout.abandon(begun, f"the trainer failed: {type(error).__name__}: {error}", kill=self.kills_abandoned)
            raise
        confirmed = rollout.call("update", last_message)
        finished = rollout.call("finish_update", plan.version) if rollout.engines else {}
        return {engine: _first_error(confirmed[engine], finished.get(engine)) for engine in confirmed}


def describe_export(
    context: SourceContext, key: str, handle: Any, dtype: str, byte_budget: int | None
) -> tuple[str, PushPlan | None]:
    """Runs on every rank: the rank's CUDA device and, on the source rank, what a push would send."""
    infos = tuple(context.runtime.weight_infos(context.handle(handle), dtype=dtype_from_name(dtype)))
    largest = max(infos, key=lambda info: info.nbytes, default=None)
    if byte_budget is not None and largest is not None and largest.nbytes > byte_budget:
        raise ConfigError.of(
            "WeightSync.byte_budget",
            byte_budget,
            f"must hold the largest tensor, {largest.name} with {largest.nbytes} bytes",
        )
    if context.rank != SOURCE_RANK:
        return _cuda_device(), None
    model: SourceHandle = context.handle(handle)
    version, kept = model.weight_version, tuple(model.kept)
    node_id = ray.get_runtime_context().get_node_id()
    return _cuda_device(), PushPlan(key, handle, dtype, byte_budget, version, infos, node_id, host_identity(), kept=kept)


def make_plan(descriptions: list[tuple[str, PushPlan | None]]) -> PushPlan:
    """The source rank's plan with every rank's device in it."""
    plan = descriptions[SOURCE_RANK][1]
    if plan is None:
        raise WeightSyncError(f"rank {SOURCE_RANK} of the training group did not describe its weights")
    devices = tuple(device for device, _ in descriptions)
    return replace(plan, device_ids=devices if all(devices) else ())


def export(context: SourceContext, plan: PushPlan) -> Any:
    """The runtime's iterator of (name, full tensor); a collective over the ranks."""
    model = context.handle(plan.handle)
    return context.runtime.export_weights(model, dtype=dtype_from_name(plan.dtype), byte_budget=plan.byte_budget)


def take_part(context: SourceContext, plan: PushPlan) -> None:
    """What a rank does that does not send: it joins the export."""
    for _ in export(context, plan):
        pass


def from_source(results: list[Any]) -> Any:
    """The source rank's result of ``run_on_ranks``; raises it when it is one of our errors."""
    result = results[SOURCE_RANK]
    if isinstance(result, RLBackendError):
        raise result
    return result


def raise_failures(outcomes: dict[int, Any]) -> None:
    """Raises when any engine's outcome is an error: the first one's type, the text of all."""
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, RLBackendError)]
    if not failures:
        return
    first = failures[0]
    if len(failures) == 1:
        raise first
    raise type(first)("; ".join(str(failure) for failure in failures), **first.details)


def _first_error(*outcomes: Any) -> Any:
    return next((outcome for outcome in outcomes if isinstance(outcome, RLBackendError)), None)


def _cuda_device() -> str:
    # A rank whose model is on a GPU has a CUDA context; one that trains on the CPU of a machine with GPUs has none.
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
