"""Transports: the plan of a push, what all of them have in common, and those that stage weights before any is loaded.

**Senders**. Where ranks hold rectangles of the weights (``Runtime.shard_infos``), each sends those that the plan gives it;
nothing is gathered. The plan is proved to be every tensor once. Else all ranks gather whole tensors, which the source rank
sends: of a tenant that is merged, and on a single rank.

**Receivers**. Where engines have several workers, what travels is cut into tiles (:mod:`rl_backend.weights.tiles`): the
rectangles that each worker's loaders read. Each has its own place in an engine's staging buffer, workers get their own
alone, and what several of them read is sent once to each engine.

**Shared memory**, for trainer and engines on one host. Each byte is copied once into a mapping under /dev/shm; engines map
the same bytes, verify them and hand views of them to vLLM's loaders. Segment and mappings stay for the next push, which may
write to it because no engine keeps a reference to it after it has acknowledged. While a rank stages, it tells the engines,
part by part, what is in its place already, and they check that part. Nobody waits for these messages, and an engine notes
only what has passed. When all is staged, ``verify`` checks the rest, which is also what a lost or late message has left.

**Gloo**, for engines on other hosts. Each sender broadcasts its part to one process of every engine, which receives from
all at one time into its own shared-memory segment. From there on both are the same: verify everywhere, then load.
With ``changed_only`` a sender keeps a copy of what it sent, and an engine's segment holds what it received. If the push
before came from the same ranks in the same pieces, and all engines hold and have verified it, ranks send patches of it.
Digests are of whole pieces after the patch. In all other cases everything is sent.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain
from typing import Any, Literal, NamedTuple

import ray
import torch
from torch import Tensor

from actors.cluster.rendezvous import (
    GlooAddress,
    GlooGroup,
    RendezvousPoint,
    node_address,
    rendezvous_address,
)
from actors.rollout.group.engines import EngineSet, raise_failures
from actors.sync.source import SourceContext, SourceRanks
from actors.wire.segment import Segment, SharedSegment, host_identity, map_segment
from rl_backend.contracts import (
    ConfigError,
    RLBackendError,
    TensorInfo,
    TensorPart,
    TensorTile,
    WeightManifest,
    WeightShard,
    WeightSyncError,
    dtype_from_name,
)
from rl_backend.weights.changes import make_patch
from rl_backend.weights.inspection import BlockThreads, block_threads, tensor_digest
from rl_backend.weights.staging import as_announced, plan_layout, require_covered, write_tensors
from rl_backend.weights.tiles import TileMap, slices_in

type SendMode = Literal["all", "keep", "patch"]
"""What a rank sends over gloo: all; all, of which it keeps copies; or patches of its copies."""

type TransportName = Literal["auto", "shared_memory", "gloo", "nccl", "cuda_ipc"]

SOURCE_RANK = 0
"""The training rank that describes the weights, and sends them where the others have only a part in the export."""

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
        parts: the rectangles that ranks hold and send, without offsets or digests; empty where the source rank sends all.
        tiles: what engines of several workers are sent, without offsets or digests; empty where they take whole tensors.
        on_one_host: whether all ranks are on ``host``.
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
    parts: tuple[TensorPart, ...] = ()
    tiles: tuple[TensorTile, ...] = ()
    on_one_host: bool = True

    @property
    def manifest(self) -> WeightManifest:
        return WeightManifest(version=self.version, tensors=self.infos, kept=self.kept)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos)

    @property
    def senders(self) -> list[int]:
        """Ranks."""
        return sorted({part.rank for part in self.parts}) or [SOURCE_RANK]

    @property
    def kind(self) -> Literal["parts", "tiles", "tensors"]:
        """What of a manifest is sent, and has digests."""
        return "parts" if self.parts else "tiles" if self.tiles else "tensors"

    @property
    def staged_bytes(self) -> int:
        """Of a staging buffer."""
        return plan_layout(self.tiles or self.infos)[1]

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each worker of an engine is sent; all engines are alike."""
        workers = range(max((worker for tile in self.tiles for worker in tile.workers), default=0) + 1)
        if not self.tiles:
            return (self.nbytes,)
        return tuple(sum(tile.nbytes for tile in self.tiles if worker in tile.workers) for worker in workers)

    def placed(self) -> WeightManifest:
        """Tensors, or tiles of them, with places in a staging buffer."""
        if self.tiles:
            return WeightManifest(version=self.version, tensors=self.infos, tiles=plan_layout(self.tiles)[0])
        return WeightManifest(version=self.version, tensors=plan_layout(self.infos)[0])

    def staged(self, rank: int | None = None) -> WeightManifest:
        """What is sent, of all rectangles or of those of one rank, with places in a staging buffer."""
        manifest = self.placed()
        parts = [part for part in self.parts if rank in (None, part.rank)]
        if manifest.tiles:
            return manifest.replace(parts=tuple(TileMap(manifest.tiles).cut_parts(parts)))
        offsets = {info.name: info.offset for info in manifest.tensors}
        return manifest.replace(parts=tuple(part.replace(offset=offsets[part.name]) for part in parts))

    def pieces(self, held: Generator[WeightShard]) -> Iterator[tuple[str, Tensor]]:
        """Rectangles that a rank holds, or whole tensors, as they are sent: cut where tiles are, each under its text."""
        tiles = TileMap(self.tiles)
        # In general a collective's, which is to end where this ends early.
        with closing(held):
            for shard in held:
                if not self.tiles:
                    yield (str(shard) if self.parts else shard.name), shard.tensor
                for tile, box in tiles.pieces(shard.name, shard.offset, shard.tensor.shape):
                    tensor = shard.tensor[slices_in(box, shard.offset)]
                    yield (str(tile.part(box, SOURCE_RANK)) if self.parts else tile.name), tensor


@dataclass(frozen=True)
class Staged:
    """Weights that wait in shared memory.

    Attributes:
        key: of the push; engines have checked parts of it under this key, or hold it.
        sent: bytes that each rank has sent.
        received: bytes of the weights that each worker of an engine has been sent.
        changed: elements that were sent as changed; None where all were sent.
    """

    manifest: WeightManifest
    segments: Mapping[int, Segment]
    key: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    changed: int | None = None


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
) -> tuple[str, str, PushPlan | None]:
    """Runs on every rank: the rank's CUDA device, its host and, on the source rank, what a push would send."""
    model = context.handle(handle)
    infos = tuple(context.runtime.weight_infos(model, dtype=dtype_from_name(dtype)))
    largest = max(infos, key=lambda info: info.nbytes, default=None)
    if byte_budget is not None and largest is not None and largest.nbytes > byte_budget:
        raise ConfigError.of(
            "WeightSync.byte_budget",
            byte_budget,
            f"must hold the largest tensor, {largest.name} with {largest.nbytes} bytes",
        )
    device, host = _cuda_device(), host_identity()
    parts = context.runtime.shard_infos(model, dtype=dtype_from_name(dtype)) if context.world_size > 1 else ()
    if context.rank != SOURCE_RANK:
        return device, host, None
    version, kept, node_id = model.weight_version, tuple(model.kept), ray.get_runtime_context().get_node_id()
    return device, host, PushPlan(key, handle, dtype, byte_budget, version, infos, node_id, host, kept=kept, parts=parts)


def make_plan(descriptions: list[tuple[str, str, PushPlan | None]]) -> PushPlan:
    """Raises :class:`~rl_backend.contracts.WeightCheckError` where the rectangles of a tensor are not all of it once."""
    devices, hosts, plans = zip(*descriptions, strict=True)
    plan: PushPlan | None = plans[SOURCE_RANK]
    assert plan is not None, "the source rank describes its weights"
    if plan.parts:
        require_covered(plan.infos, plan.parts)
    return replace(plan, device_ids=devices if all(devices) else (), on_one_host=set(hosts) == {plan.host})


def export(context: SourceContext, plan: PushPlan) -> Any:
    """The runtime's iterator of (name, full tensor); a collective over the ranks."""
    model = context.handle(plan.handle)
    return context.runtime.export_weights(model, dtype=dtype_from_name(plan.dtype), byte_budget=plan.byte_budget)


def own_pieces(context: SourceContext, plan: PushPlan) -> tuple[Sequence[TensorInfo], Iterable[tuple[str, Tensor]]]:
    """What this rank sends, as announced and as it comes. A rank that sends nothing has taken part in the export."""
    pieces: Sequence[TensorInfo] = ()
    if plan.parts:
        model, dtype = context.handle(plan.handle), dtype_from_name(plan.dtype)
        pieces = plan.staged(context.rank).parts
        weights = plan.pieces(context.runtime.export_shards(model, dtype=dtype, held=True))
    elif context.rank == SOURCE_RANK:
        pieces, weights = plan.placed().placed, plan.pieces(_whole(export(context, plan)))
    else:
        weights = export(context, plan)
    if not pieces:
        deque(weights, maxlen=0)
    return pieces, weights


def _whole(exported: Generator[tuple[str, Tensor]]) -> Generator[WeightShard]:
    with closing(exported):
        for name, tensor in exported:
            yield WeightShard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def from_source(results: list[Any]) -> Any:
    result = results[SOURCE_RANK]
    if isinstance(result, RLBackendError):
        raise result
    return result


def staged_of_ranks(plan: PushPlan, sent: Sequence[Any], segments: Mapping[int, Segment], key: str = "") -> Staged:
    """Joins the pieces that each rank has sent."""
    manifest = plan.placed().replace(**{plan.kind: tuple(chain(*sent))})
    nbytes = tuple(sum(piece.nbytes for piece in of_rank) for of_rank in sent)
    return Staged(manifest, segments, key, nbytes, received=plan.received)


def _cuda_device() -> str:
    # A rank whose model is on a GPU has a CUDA context; one that trains on the CPU of a machine with GPUs has none.
    if not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


class SharedMemoryTransport(StagedTransport):
    """Through one shared-memory segment. The host needs room for all weights in /dev/shm. Where ranks are on other hosts
    than the source rank, which write nothing here, it sends all.
    """

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
        if not plan.on_one_host:
            plan = replace(plan, parts=())
        segment: Segment = from_source(train.run_on_ranks(reserve_segment, plan))
        if self._segment is not None and self._segment != segment:
            rollout.call("forget_segment", self._segment.path)
        self._segment = segment
        key = uuid.uuid4().hex
        written = train.run_on_ranks(write_segment, plan, segment, key, rollout.actors())
        return staged_of_ranks(plan, written, dict.fromkeys(rollout.engines, segment), key)

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
    nbytes = plan.staged_bytes
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
    context: SourceContext, plan: PushPlan, segment: Segment, key: str = "", engines: Sequence[Any] = ()
) -> Sequence[TensorInfo]:
    """Runs on every rank, a collective: writes what the rank sends, with its digests, and tells ``engines`` of it."""
    pieces, weights = own_pieces(context, plan)
    if not pieces:
        return ()
    told = _StagedParts(plan, pieces, key, segment, engines)
    with torch.no_grad():
        buffer = _mapped(context, plan.key, segment)
        return write_tensors(buffer, pieces, weights, threads=torch.get_num_threads(), staged=told.add)


def _mapped(context: SourceContext, key: str, segment: Segment) -> Tensor:
    # The source rank has made the segment; the others keep a mapping of it for the next push.
    kept = context.state.get(key)
    if isinstance(kept, SharedSegment):
        return kept.buffer
    if kept is None or kept[0] != segment:
        kept = context.state[key] = segment, map_segment(*segment)
    buffer: Tensor = kept[1]
    return buffer


class _StagedParts:
    def __init__(
        self, plan: PushPlan, pieces: Sequence[TensorInfo], key: str, segment: Segment, engines: Sequence[Any]
    ) -> None:
        self._empty = WeightManifest(version=plan.version, tensors=())
        self._kind = plan.kind
        self._key = key
        self._segment = segment
        self._engines = engines
        self._left = sum(piece.nbytes for piece in pieces)
        self._part: list[TensorInfo] = []
        self._part_bytes = 0

    def add(self, info: TensorInfo) -> None:
        self._part.append(info)
        self._part_bytes += info.nbytes
        # Not of the last part, which they are asked to verify with all of it.
        rest = self._left - self._part_bytes
        if self._part_bytes < max(PART_BYTES, self._left // _SHARE) or not rest:
            return
        part = self._empty.replace(**{self._kind: tuple(self._part)})
        self._left, self._part, self._part_bytes = rest, [], 0
        for engine in self._engines:
            engine.verify_part.remote(self._key, part, self._segment)


def drop_segment(context: SourceContext, key: str) -> None:
    kept: Any = context.state.pop(key, None)
    # Of a rank that has not made it there is a mapping.
    if hasattr(kept, "close"):
        kept.close()


class GlooTransport(StagedTransport):
    """By gloo broadcasts. Every engine's host needs room for all weights in /dev/shm; with ``changed_only`` ranks keep in
    their memory what they send.
    """

    name = "gloo"

    def __init__(self, *, changed_only: bool = False) -> None:
        self._changed_only = changed_only
        self._members: dict[int, int] = {}
        self._source: SourceRanks | None = None
        self._key = ""
        # The push that ranks have copies of: its key, and all that was sent.
        self._push: tuple[str, Any] | None = None

    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        # Every host that Ray reaches can be reached.
        return ""

    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        self._key = plan.key
        # First what waits for engines that sample: ranks wait for them to connect for a short time alone.
        segments = rollout.call("make_segment", plan.staged_bytes)
        raise_failures(segments)
        self._connect(plan, train, rollout)
        mode = self._mode(plan, rollout)
        self._push = None
        receiving = rollout.start_call("receive", plan.key, plan.staged(), mode == "patch")
        try:
            sent = train.run_on_ranks(broadcast_weights, plan, mode)
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
        raise_failures(dict(enumerate(sent)))
        pieces, nbytes, changed = zip(*sent, strict=True)
        staged = staged_of_ranks(plan, pieces, segments, uuid.uuid4().hex)
        if self._changed_only:
            self._push = staged.key, (plan.infos, plan.parts, plan.tiles)
        return replace(staged, sent=nbytes, changed=sum(changed) if mode == "patch" else None)

    def _mode(self, plan: PushPlan, rollout: EngineSet) -> SendMode:
        if not self._changed_only:
            return "all"
        if self._push is None or self._push[1] != (plan.infos, plan.parts, plan.tiles):
            return "keep"
        held = rollout.call("held_push")
        raise_failures(held)
        return "patch" if set(held.values()) == {self._push[0]} else "keep"

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:
        if self._key:
            if rollout.engines:
                # Not waited for: an engine may be sampling, and it does this before anything that is asked of it later.
                rollout.start_call("leave_gloo", self._key)
            train.run_on_ranks(disconnect, self._key)
        self._members = {}

    def _connect(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> None:
        # For each sender a group of it and all living engines, made again when any of them changes.
        members = {engine: rollout.infos[engine].pid for engine in rollout.engines}
        if members == self._members and train == self._source:
            return
        self._push = None
        nodes = [rollout.infos[engine].node_ip for engine in members]
        listening = train.run_on_ranks(listen, plan.key, plan.senders, nodes, rollout.config.call_timeout)
        addresses = {rank: address for rank, address in enumerate(listening) if address is not None}
        positions = {engine: position for position, engine in enumerate(members, start=1)}
        joining = rollout.start_call("join_gloo", plan.key, addresses, each=lambda engine: (positions[engine],))
        connected = train.run_on_ranks(connect, plan.key)
        # A rank that waits in vain says so first.
        raise_failures(rollout.gather(joining, 2 * rollout.config.call_timeout))
        raise_failures(dict(enumerate(connected)))
        self._members, self._source = members, train


class Sent(NamedTuple):
    """What a rank has sent: its pieces with their digests, bytes, and elements that were sent as changed."""

    pieces: Sequence[TensorInfo] = ()
    nbytes: int = 0
    changed: int = 0


@dataclass
class _Connection:
    """A sender's way to the engines and, where pushes send what changed, copies of what they have from it, by its pieces."""

    point: RendezvousPoint
    address: GlooAddress
    group: GlooGroup | None = None
    copies: dict[TensorInfo, Tensor] = field(default_factory=dict)

    def send(self, info: TensorInfo, tensor: Tensor, mode: SendMode, pool: BlockThreads | None) -> tuple[int, int]:
        """Sends a host tensor, or a patch of its copy; returns bytes and the number of changed elements."""
        assert self.group is not None, "connect() comes before"
        if mode == "patch":
            patch = make_patch(self.copies[info], tensor, pool)
            self.group.broadcast(patch.table)
            self.group.broadcast(patch.payload)
            return patch.nbytes, patch.changed
        if mode == "keep":
            self.copies[info] = tensor.clone()
        self.group.broadcast(tensor)
        return tensor.nbytes, 0


def listen(
    context: SourceContext, key: str, senders: Sequence[int], nodes: Sequence[str], timeout: float
) -> GlooAddress | None:
    """Where engines on ``nodes`` meet this rank, if it is a sender."""
    if context.rank not in senders:
        return None
    disconnect(context, key)
    point = RendezvousPoint(rendezvous_address([node_address(), *nodes]), timedelta(seconds=timeout))
    address = GlooAddress(point.rendezvous, 1 + len(nodes), timeout)
    context.state[key] = _Connection(point, address)
    return address


def connect(context: SourceContext, key: str) -> RLBackendError | None:
    if key not in context.state:
        return None
    connection: _Connection = context.state[key]
    try:
        connection.group = GlooGroup(connection.address, 0)
    except RuntimeError as error:
        return WeightSyncError(
            f"transport='gloo': an engine did not join rank {context.rank} in {connection.address.timeout:g} s "
            f"(RolloutConfig.call_timeout): {error}"
        )
    return None


def broadcast_weights(context: SourceContext, plan: PushPlan, mode: SendMode = "all") -> Sent | RLBackendError:
    """Runs on every rank, a collective: sends what the rank sends, or patches of it; returns it with its digests."""
    pieces, weights = own_pieces(context, plan)
    if not pieces:
        return Sent()
    connection: _Connection = context.state[plan.key]
    if mode == "keep":
        connection.copies.clear()
    sent: list[TensorInfo] = []
    nbytes = changed = 0
    failure: Exception | None = None
    with torch.no_grad(), block_threads(torch.get_num_threads()) as pool:
        # After a failed broadcast the export still runs to its end: the other ranks are in its collectives.
        for info, tensor in as_announced(pieces, weights):
            if failure is None:
                host_tensor = tensor.detach().to("cpu").contiguous()
                sent.append(info.replace(digest=tensor_digest(host_tensor, by_rows=info.by_rows)))
                try:
                    of_tensor = connection.send(info, host_tensor, mode, pool)
                    nbytes, changed = nbytes + of_tensor[0], changed + of_tensor[1]
                except RuntimeError as error:
                    failure = error
    if failure is not None:
        disconnect(context, plan.key)
        return WeightSyncError(f"transport='gloo': the broadcast of rank {context.rank} to the engines failed: {failure}")
    return Sent(tuple(sent), nbytes, changed)


def disconnect(context: SourceContext, key: str) -> None:
    if key not in context.state:
        return
    connection: _Connection = context.state.pop(key)
    connection.point.close()
    if connection.group is not None:
        connection.group.close()
