"""Weights by gloo broadcast, for engines on other hosts.

The source rank broadcasts each exported tensor to one process of every engine, which receives it into a shared-memory
segment of its own. From there on it is the shared-memory transport: verify everywhere, then load.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from actors.cluster.rendezvous import RendezvousPoint, node_address, rendezvous_address
from actors.rollout.engines import EngineSet
from actors.sync.source import SourceContext, SourceRanks
from actors.sync.transport.base import (
    SOURCE_RANK,
    PushPlan,
    Staged,
    StagedTransport,
    export,
    from_source,
    raise_failures,
    take_part,
)
from actors.wire.gloo_group import TIMEOUT, Address, GlooGroup
from rl_backend.contracts import RLBackendError, TensorInfo, WeightManifest, WeightSyncError
from rl_backend.weights.compare import as_announced
from rl_backend.weights.inspection import tensor_digest
from rl_backend.weights.staging import plan_layout


class GlooTransport(StagedTransport):
    """See the module. Every engine's host needs room for all weights in /dev/shm."""

    name = "gloo"

    def __init__(self) -> None:
        self._members: dict[int, int] = {}
        self._key = ""

    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        """Every host that Ray reaches can be reached."""

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
        """One gloo group of the source rank and all living engines; made again when the engines change."""
        members = {engine: rollout.infos[engine].pid for engine in rollout.engines}
        if members == self._members:
            return
        size = len(members) + 1
        source = from_source(train.run_on_ranks(source_node))
        nodes = [source, *(rollout.infos[engine].node_ip for engine in members)]
        address: Address = from_source(train.run_on_ranks(listen, self._key, rendezvous_address(nodes), size))
        positions = {engine: position for position, engine in enumerate(members, start=1)}
        joining = rollout.start_call("join_gloo", self._key, address, each=lambda engine: (positions[engine],))
        connected = train.run_on_ranks(connect, self._key)
        raise_failures(rollout.gather(joining, 2 * TIMEOUT.total_seconds()))
        from_source(connected)
        self._members = members


def source_node(context: SourceContext) -> str | None:
    """Runs on every rank: the address of the source rank's node."""
    return node_address() if context.rank == SOURCE_RANK else None


def listen(context: SourceContext, key: str, address: str, size: int) -> Address | None:
    """Runs on every rank: the source rank opens the store where all meet."""
    if context.rank != SOURCE_RANK:
        return None
    disconnect(context, key)
    point = RendezvousPoint(address, TIMEOUT)
    context.state[key] = (point, Address(point.rendezvous, size))
    return Address(point.rendezvous, size)


def connect(context: SourceContext, key: str) -> RLBackendError | None:
    """Runs on every rank: the source rank takes its place in the group, while the engines take theirs."""
    if context.rank != SOURCE_RANK:
        return None
    point, address = context.state[key]
    try:
        context.state[key] = (point, GlooGroup(address, SOURCE_RANK))
    except RuntimeError as error:
        return WeightSyncError(f"transport='gloo': an engine did not join within {TIMEOUT.total_seconds():g} s: {error}")
    return None


def broadcast_weights(context: SourceContext, plan: PushPlan) -> WeightManifest | RLBackendError | None:
    """Runs on every rank, a collective: the source rank sends what all export together."""
    if context.rank != SOURCE_RANK:
        take_part(context, plan)
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
                failure = _try_broadcast(group, host_tensor)
    if failure is not None:
        disconnect(context, plan.key)
        return WeightSyncError(f"transport='gloo': the broadcast to the engines failed: {failure}")
    return WeightManifest(version=plan.version, tensors=tuple(sent))


def disconnect(context: SourceContext, key: str) -> None:
    """Runs on every rank: leaves the group, and closes the store to others."""
    if key not in context.state:
        return
    point, group = context.state.pop(key)
    point.close()
    if isinstance(group, GlooGroup):
        group.close()


def _try_broadcast(group: GlooGroup, tensor: Tensor) -> Exception | None:
    try:
        group.broadcast(tensor)
    except RuntimeError as error:
        return error
    return None
