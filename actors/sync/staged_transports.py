"""Transports: the plan of a push, what all of them have in common, and those that stage weights before any is loaded.

**Shared memory**, for trainer and engines on one host. The source rank copies each exported tensor once into a mapping
under /dev/shm; engines map the same bytes, verify them and hand views of them to vLLM's loaders. Segment and mappings stay
for the next push, which may write to it because no engine keeps a reference to it after it has acknowledged. While the
source rank stages, it tells the engines, part by part, what is in its place already, and they check that part. Nobody waits
for these messages, and an engine notes only what has passed. When all is staged, ``verify`` checks the rest, which is also
what a lost or late message has left.

**Gloo**, for engines on other hosts. The source rank broadcasts each exported tensor to one process of every engine, which
receives it into its own shared-memory segment. From there on both are the same: verify everywhere, then load.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
import torch

from actors.cluster.rendezvous import (
    GLOO_TIMEOUT,
    GlooAddress,
    GlooGroup,
    RendezvousPoint,
    node_address,
    rendezvous_address,
)
from actors.rollout.group.engines import EngineSet, raise_failures
from actors.sync.source import SourceContext, SourceHandle, SourceRanks
from actors.wire.segment import Segment, SharedSegment, host_identity
from rl_backend.contracts import (
    ConfigError,
    RLBackendError,
    TensorInfo,
    WeightManifest,
    WeightSyncError,
    dtype_from_name,
)
from rl_backend.weights.inspection import tensor_digest
from rl_backend.weights.staging import as_announced, plan_layout, write_tensors

type TransportName = Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"]

SOURCE_RANK = 0
"""The training rank that sends; the others take part in the export."""

# Of weights that engines are told of at one time, at least: a message takes as long as copying some MiB.
PART_BYTES = 2**25
# A part is a fourth of what is left to stage: few messages, and little to verify once all is staged.
_SHARE = 4


@dataclass(frozen=True)
class PushPlan:
    """One push, as the source rank describes it before any weight moves.

    Attributes:
        key: of the :class:`~actors.sync.push.WeightSync`; ranks keep its buffers and connections under it.
        infos: the tensors, in order, without offsets or digests.
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
        return WeightManifest(version=self.version, tensors=self.infos, kept=self.kept)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)


@dataclass(frozen=True)
class Staged:
    """Weights that wait in shared memory. Engines have checked parts of them already under ``key``, if there is one."""

    manifest: WeightManifest
    segments: Mapping[int, Segment]
    key: str = ""


class Transport(ABC):
    """Moves weights from the ranks of a training group to the engines of a rollout group."""

    name: str

    @abstractmethod
    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        """Why it cannot serve these ranks and engines, and what to use; empty where it can."""

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:  # noqa: B027, most transports keep something
        """Frees what the transport keeps in ranks and engines."""


class StagedTransport(Transport):
    """Brings the weights to a buffer beside each engine, where they are verified before any is loaded.

    Attributes:
        is_kept: until the next push the weights stay where any engine of the host can read them.
    """

    is_kept = False

    @abstractmethod
    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        """Fills a staging segment on the host of every living engine."""


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
    plan = descriptions[SOURCE_RANK][1]
    assert plan is not None, "the source rank describes its weights"
    devices = tuple(device for device, _ in descriptions)
    return replace(plan, device_ids=devices if all(devices) else ())


def export(context: SourceContext, plan: PushPlan) -> Any:
    """The runtime's iterator of (name, full tensor); a collective over the ranks."""
    model = context.handle(plan.handle)
    return context.runtime.export_weights(model, dtype=dtype_from_name(plan.dtype), byte_budget=plan.byte_budget)


def join_export(context: SourceContext, plan: PushPlan) -> None:
    # A rank that does not send takes part in the collectives of the export.
    deque(export(context, plan), maxlen=0)


def from_source(results: list[Any]) -> Any:
    result = results[SOURCE_RANK]
    if isinstance(result, RLBackendError):
        raise result
    return result


def _cuda_device() -> str:
    # A rank whose model is on a GPU has a CUDA context; one that trains on the CPU of a machine with GPUs has none.
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class SharedMemoryTransport(StagedTransport):
    """Through one shared-memory segment. The host needs room for all weights in /dev/shm."""

    name = "shared_memory"
    is_kept = True

    def __init__(self) -> None:
        self._key = ""
        self._segment: Segment | None = None

    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        infos = [rollout.infos[engine] for engine in rollout.engines]
        elsewhere = ", ".join(info.name for info in infos if info.host != plan.host)
        return elsewhere and f"{elsewhere} and the trainer's source rank do not share /dev/shm; use transport='gloo'"

    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        self._key = plan.key
        segment: Segment = from_source(train.run_on_ranks(reserve_segment, plan))
        if self._segment is not None and self._segment != segment:
            rollout.call("forget_segment", self._segment.path)
        self._segment = segment
        key = uuid.uuid4().hex
        manifest: WeightManifest = from_source(train.run_on_ranks(write_segment, plan, key, rollout.actors()))
        return Staged(manifest, dict.fromkeys(rollout.engines, segment), key)

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:
        if self._segment is not None:
            if rollout.engines:
                # Not waited for: an engine may be sampling, and it does this before anything that is asked of it later.
                rollout.start_call("forget_segment", self._segment.path)
            train.run_on_ranks(drop_segment, self._key)
            self._segment = None


def reserve_segment(context: SourceContext, plan: PushPlan) -> Segment | RLBackendError | None:
    if context.rank != SOURCE_RANK:
        return None
    _, nbytes = plan_layout(plan.infos)
    segment: SharedSegment | None = context.state.get(plan.key)
    if segment is None or segment.nbytes < nbytes:
        if segment is not None:
            segment.close()
            del context.state[plan.key]
        try:
            segment = SharedSegment(nbytes)
        except WeightSyncError as error:
            return error
        context.state[plan.key] = segment
    return Segment(str(segment.path), segment.nbytes)


def write_segment(
    context: SourceContext, plan: PushPlan, key: str = "", engines: Sequence[Any] = ()
) -> WeightManifest | None:
    """Runs on every rank, a collective: the source rank writes what all export, and tells ``engines`` of what is staged."""
    if context.rank != SOURCE_RANK:
        join_export(context, plan)
        return None
    segment: SharedSegment = context.state[plan.key]
    parts = _StagedParts(plan, key, Segment(str(segment.path), segment.nbytes), engines)
    layout, _ = plan_layout(plan.infos)
    with torch.no_grad():
        return write_tensors(
            segment.buffer,
            layout,
            export(context, plan),
            version=plan.version,
            threads=torch.get_num_threads(),
            staged=parts.add,
        )


class _StagedParts:
    def __init__(self, plan: PushPlan, key: str, segment: Segment, engines: Sequence[Any]) -> None:
        self._version = plan.version
        self._key = key
        self._segment = segment
        self._engines = engines
        self._left = plan.nbytes
        self._part: list[TensorInfo] = []
        self._part_bytes = 0

    def add(self, info: TensorInfo) -> None:
        self._part.append(info)
        self._part_bytes += info.nbytes
        # Not of the last part, which they are asked to verify with all of it.
        rest = self._left - self._part_bytes
        if self._part_bytes < max(PART_BYTES, self._left // _SHARE) or not rest:
            return
        part = WeightManifest(version=self._version, tensors=tuple(self._part))
        self._left, self._part, self._part_bytes = rest, [], 0
        for engine in self._engines:
            engine.verify_part.remote(self._key, part, self._segment)


def drop_segment(context: SourceContext, key: str) -> None:
    segment: Any = context.state.pop(key, None)
    if segment is not None:
        segment.close()


class GlooTransport(StagedTransport):
    """By gloo broadcast. Every engine's host needs room for all weights in /dev/shm."""

    name = "gloo"

    def __init__(self) -> None:
        self._members: dict[int, int] = {}
        self._key = ""

    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        # Every host that Ray reaches can be reached.
        return ""

    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        self._key = plan.key
        layout, nbytes = plan_layout(plan.infos)
        # First what waits for engines that sample: the source rank waits for them to connect for a short time alone.
        segments = rollout.call("make_segment", nbytes)
        raise_failures(segments)
        self._connect(train, rollout)
        receiving = rollout.start_call("receive", plan.key, WeightManifest(version=plan.version, tensors=layout))
        try:
            sent = train.run_on_ranks(broadcast_weights, plan)
        except BaseException:
            # Without the sender's connections, engines that still wait for weights stop.
            self._members = {}
            with suppress(RLBackendError):
                train.run_on_ranks(disconnect, plan.key)
            rollout.gather(receiving)
            raise
        received = rollout.gather(receiving)
        if any(isinstance(result, RLBackendError) for result in (*sent, *received.values())):
            self._members = {}
        raise_failures(received)
        return Staged(from_source(sent), segments)

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:
        if self._key:
            if rollout.engines:
                # Not waited for: an engine may be sampling, and it does this before anything that is asked of it later.
                rollout.start_call("leave_gloo", self._key)
            train.run_on_ranks(disconnect, self._key)
        self._members = {}

    def _connect(self, train: SourceRanks, rollout: EngineSet) -> None:
        # One group of the source rank and all living engines, made again when the engines change.
        members = {engine: rollout.infos[engine].pid for engine in rollout.engines}
        if members == self._members:
            return
        size = len(members) + 1
        source = from_source(train.run_on_ranks(source_node))
        nodes = [source, *(rollout.infos[engine].node_ip for engine in members)]
        address: GlooAddress = from_source(train.run_on_ranks(listen, self._key, rendezvous_address(nodes), size))
        positions = {engine: position for position, engine in enumerate(members, start=1)}
        joining = rollout.start_call("join_gloo", self._key, address, each=lambda engine: (positions[engine],))
        connected = train.run_on_ranks(connect, self._key)
        raise_failures(rollout.gather(joining, 2 * GLOO_TIMEOUT.total_seconds()))
        from_source(connected)
        self._members = members


def source_node(context: SourceContext) -> str | None:
    return node_address() if context.rank == SOURCE_RANK else None


def listen(context: SourceContext, key: str, address: str, size: int) -> GlooAddress | None:
    if context.rank != SOURCE_RANK:
        return None
    disconnect(context, key)
    point = RendezvousPoint(address, GLOO_TIMEOUT)
    context.state[key] = (point, GlooAddress(point.rendezvous, size))
    return GlooAddress(point.rendezvous, size)


def connect(context: SourceContext, key: str) -> RLBackendError | None:
    if context.rank != SOURCE_RANK:
        return None
    point, address = context.state[key]
    try:
        context.state[key] = (point, GlooGroup(address, SOURCE_RANK))
    except RuntimeError as error:
        return WeightSyncError(
            f"transport='gloo': an engine did not join within {GLOO_TIMEOUT.total_seconds():g} s: {error}"
        )
    return None


def broadcast_weights(context: SourceContext, plan: PushPlan) -> WeightManifest | RLBackendError | None:
    """Runs on every rank, a collective: the source rank sends what all export together."""
    if context.rank != SOURCE_RANK:
        join_export(context, plan)
        return None
    _, group = context.state[plan.key]
    layout, _ = plan_layout(plan.infos)
    sent: list[TensorInfo] = []
    failure: Exception | None = None
    with torch.no_grad():
        # After a failed broadcast the export still runs to its end: the other ranks are in its collectives.
        for info, tensor in as_announced(layout, export(context, plan)):
            if failure is None:
                host_tensor = tensor.detach().to("cpu").contiguous()
                sent.append(info.replace(digest=tensor_digest(host_tensor)))
                try:
                    group.broadcast(host_tensor)
                except RuntimeError as error:
                    failure = error
    if failure is not None:
        disconnect(context, plan.key)
        return WeightSyncError(f"transport='gloo': the broadcast to the engines failed: {failure}")
    return WeightManifest(version=plan.version, tensors=tuple(sent))


def disconnect(context: SourceContext, key: str) -> None:
    if key not in context.state:
        return
    point, group = context.state.pop(key)
    point.close()
    if isinstance(group, GlooGroup):
        group.close()
