"""Weights through one shared-memory segment, for trainer and engines on one host.

The source rank copies each exported tensor once into a mapping under /dev/shm; engines map the same bytes, verify them and
hand views of them to vLLM's loaders. The segment and its mappings stay for the next push, which may write to it because no
engine keeps a reference to it after it has acknowledged.

While the source rank stages, it tells the engines, part by part, what is in its place already, and they check that part.
Nobody waits for these messages, and an engine notes only what has passed. When all is staged, ``verify`` checks the rest,
which is also what a lost or late message has left.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch

from actors.rollout.group.engines import EngineSet
from actors.sync.source import SourceContext, SourceRanks
from actors.sync.transport.base import (
    SOURCE_RANK,
    PushPlan,
    Staged,
    StagedTransport,
    export,
    from_source,
    take_part,
)
from actors.wire.segment import Segment, SharedSegment
from rl_backend.contracts import RLBackendError, TensorInfo, UnsupportedError, WeightManifest, WeightSyncError
from rl_backend.weights.staging import plan_layout, write_tensors

PART_BYTES = 2**25
"""Of weights that engines are told of at one time, at least: a message takes as long as copying some MiB."""

_SHARE = 4
"""A part is a fourth of what is left to stage: few messages, and little to verify once all is staged."""


class SharedMemoryTransport(StagedTransport):
    """See the module. The host needs room for all weights in /dev/shm."""

    name = "shared_memory"

    def __init__(self) -> None:
        self._key = ""
        self._segment: Segment | None = None

    def check(self, plan: PushPlan, rollout: EngineSet) -> None:
        elsewhere = [
            info.name for engine, info in rollout.infos.items() if engine in rollout.engines and info.host != plan.host
        ]
        if elsewhere:
            raise UnsupportedError(
                f"transport='shared_memory': {', '.join(elsewhere)} and the trainer's source rank do not share /dev/shm; "
                "use transport='gloo'"
            )

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
    """Runs on every rank, is no collective: the source rank's segment, made or made larger when needed."""
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
    """Runs on every rank, a collective: the source rank writes what all export together.

    Args:
        key: of this push, for the engines.
        engines: actors that are told of what is staged, while more is.
    """
    if context.rank != SOURCE_RANK:
        take_part(context, plan)
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
    """Tells engines of what is staged. Not of the last part, which they are asked to verify with all of it."""

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
        rest = self._left - self._part_bytes
        if self._part_bytes < max(PART_BYTES, self._left // _SHARE) or not rest:
            return
        part = WeightManifest(version=self._version, tensors=tuple(self._part))
        self._left, self._part, self._part_bytes = rest, [], 0
        for engine in self._engines:
            engine.verify_part.remote(self._key, part, self._segment)


def drop_segment(context: SourceContext, key: str) -> None:
    """Runs on every rank: removes the segment."""
    segment: Any = context.state.pop(key, None)
    if segment is not None:
        segment.close()
