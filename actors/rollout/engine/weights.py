"""Weight updates of an engine: staged weights are verified, then loaded; nothing is loaded unverified."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from actors.cluster import prometheus
from actors.cluster.rendezvous import GlooAddress, GlooGroup
from actors.rollout.engine.in_process import VllmInProcess
from actors.wire.segment import Segment, SharedSegment, map_segment
from rl_backend.contracts import (
    RLBackendError,
    RolloutError,
    TensorInfo,
    TensorPart,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
    WeightVersionError,
)
from rl_backend.trace.recorder import span
from rl_backend.weights.changes import Patch, apply_patch, empty_table, payload_bytes
from rl_backend.weights.staging import check_manifest, check_staged, find_intact, read_tensor
from rl_backend.weights.tiles import Reads, require_tiles


class WeightReceiver:
    """An engine's part in pushes, whose methods :class:`~actors.sync.push.WeightSync` calls by name."""

    def __init__(self, vllm: VllmInProcess, reload_adapters: Callable[[], None]) -> None:
        self._vllm = vllm
        self._reload_adapters = reload_adapters
        self._own_segment: SharedSegment | None = None
        # The push whose verified weights the own segment holds; a next one may send only what differs from them.
        self._held_push = ""
        self._mapped: Segment | None = None
        self._buffer: Tensor | None = None
        self._staged_in_workers = False
        # Of each sync, its groups by the rank that sends in them.
        self._gloo: dict[str, dict[int, GlooGroup]] = {}
        self._verified: WeightManifest | None = None
        self._push = self._ended_push = ""
        self._intact: dict[str, TensorInfo] = {}
        self._reads: tuple[Reads, ...] | None = None

    def weight_reads(self) -> tuple[Reads, ...]:
        """What the loaders of each worker read of the weights that it is sent; found out once, without any weights."""
        if self._reads is None:
            self._vllm.serving.check("take weights")
            expected = self._vllm.expected
            with span("record reads", "weights"):
                found = self._vllm.ask_workers("weight_reads", [*expected.required.values(), *expected.optional.values()])
            self._reads = tuple(found)
        return self._reads

    def make_segment(self, nbytes: int) -> Segment:
        if self._own_segment is None or self._own_segment.nbytes < nbytes:
            self.close()
            self._own_segment = SharedSegment(nbytes)
        return Segment(str(self._own_segment.path), self._own_segment.nbytes)

    def join_gloo(self, key: str, addresses: Mapping[int, GlooAddress], position: int) -> None:
        """Joins the group of each rank that sends, in one order on all engines."""
        self._close_groups(key)
        groups = self._gloo[key] = {}
        for rank, address in addresses.items():
            groups[rank] = GlooGroup(address, position)

    def held_push(self) -> str:
        """Key of the push over gloo whose weights are in this engine's own segment, all of them verified; else empty."""
        return self._held_push

    def receive(self, key: str, layout: WeightManifest, patched: bool = False) -> None:
        """Receives weights over gloo into this engine's own segment, or ``patched`` what changed in them; nothing is
        verified or loaded yet.
        """
        self._verified, self._held_push = None, ""
        assert self._own_segment is not None, "make_segment() comes before"
        buffer, groups = self._own_segment.buffer, self._gloo[key]
        pieces: dict[int, list[TensorInfo]] = {rank: [] for rank in groups}
        for info in layout.pieces:
            pieces[info.rank if isinstance(info, TensorPart) else next(iter(groups))].append(info)

        def receive_from(rank: int) -> None:
            for info in pieces[rank]:
                place = read_tensor(buffer, info)
                if patched or place.is_contiguous():
                    received = place.contiguous()
                else:
                    received = torch.empty_like(place, memory_format=torch.contiguous_format)
                if patched:
                    _receive_patch(groups[rank], received)
                else:
                    groups[rank].broadcast(received)
                if received is not place:
                    place.copy_(received)

        try:
            # Of all at one time: nobody waits for another one's turn.
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(receive_from, groups))
        except RuntimeError as error:
            raise WeightSyncError(
                f"{self._vllm.name}: the gloo broadcast failed: {error}", engine=self._vllm.name
            ) from error

    def leave_gloo(self, key: str) -> None:
        self._close_groups(key)
        if not self._gloo:
            self.close()

    def _close_groups(self, key: str) -> None:
        for group in self._gloo.pop(key, {}).values():
            group.close()

    def forget_segment(self, path: str) -> None:
        """Drops the mappings of a segment that its owner is about to remove, here and in the workers."""
        if self._mapped is not None and self._mapped.path == path:
            self._mapped = self._buffer = self._verified = None
            if self._staged_in_workers:
                self._staged_in_workers = False
                self._vllm.ask_workers("forget_staged")

    def verify_part(self, push: str, part: WeightManifest, segment: Segment) -> None:
        """Checks tensors that a push has staged, while its trainer stages those that come after them."""
        if push == self._ended_push:
            return
        if push != self._push:
            self._push, self._intact = push, {}
        self._verified = None
        # What passes is noted for verify(), which reads only the rest and says what is wrong.
        with suppress(RLBackendError), span("verify part", "weights", weight_version=part.version, nbytes=part.nbytes):
            self._vllm.serving.check("take weights")
            # The trainer, which may be on the same cores, works at the same time.
            threads = max(len(self._vllm.cores) // 2, 1)
            self._intact |= find_intact(self._map(segment), part.pieces, threads=threads)

    def verify(self, manifest: WeightManifest, segment: Segment, push: str = "") -> float:
        """Checks that staged weights can be loaded, without loading them. Returns the seconds that it took.

        Raises:
            WeightVersionError: the weights are older than those served.
            WeightCheckError: names, shapes, dtypes, digests or values are not right.
            WeightSyncError: the segment cannot be mapped here.
            EngineDirtyError: the engine cannot be updated any more.
        """
        started = time.perf_counter()
        intact = self._intact if push == self._push else {}
        self._verified, self._push, self._intact, self._ended_push = None, "", {}, push
        with span("verify", "weights", weight_version=manifest.version, nbytes=manifest.nbytes):
            self.check_manifest(manifest)
            if manifest.tiles:
                require_tiles(manifest, self.weight_reads(), engine=self._vllm.name)
            threads = max(len(self._vllm.cores), 1)
            check_staged(self._map(segment), manifest, engine=self._vllm.name, threads=threads, intact=intact)
        self._verified = manifest
        if self._own_segment is not None and segment.path == str(self._own_segment.path):
            self._held_push = push
        return time.perf_counter() - started

    def load(self, version: int) -> float:
        """Loads the weights that :meth:`verify` accepted and stays paused until :meth:`resume`. Returns the seconds.

        Raises:
            WeightCheckError: nothing of that version has been verified; the engine keeps serving as before.
            EngineDirtyError: loading failed midway.
        """
        started = time.perf_counter()
        manifest, self._verified = self._verified, None
        if manifest is None or manifest.version != version:
            raise WeightCheckError(
                f"{self._vllm.name}: weights of version {version} were not verified", engine=self._vllm.name
            )
        self.begin_update()
        # What ranks sent is put together and verified: workers take tiles, or whole tensors.
        placed = {"tensors": ()} if manifest.tiles else {}
        self.update({"manifest": manifest.replace(parts=(), **placed).model_dump_json()})
        self.finish_update(version)
        return time.perf_counter() - started

    def pause_turns(self) -> None:
        """Begins no turn until :meth:`resume`, and returns when those in flight have ended or paused."""
        self._vllm.serving.check("take weights")
        self._vllm.loop.hold()

    def begin_update(self) -> None:
        """Stops serving, empties the prefix cache and starts vLLM's weight update. Streaming transports call it directly."""
        self.pause_turns()
        self._vllm.serving.pause()
        with span("begin update", "weights"):
            self._vllm.during_update(self._start_weight_update)

    def update(self, update_info: dict[str, Any]) -> None:
        self._vllm.serving.check("continue an update")
        with span("update", "weights"):
            self._vllm.during_update(self._vllm.llm.update_weights, {"update_info": update_info})

    def finish_update(self, version: int) -> None:
        """Ends vLLM's weight update, records the version and loads adapters again; :meth:`resume` starts serving."""
        self._vllm.serving.check("continue an update")
        with span("finish update", "weights", weight_version=version):
            self._vllm.during_update(self._vllm.llm.finish_weight_update, str(version))
        self._vllm.serving.finish(version)
        prometheus.set_gauge("rl_backend_engine_weight_version", version, engine=str(self._vllm.number))
        self._reload_adapters()

    def abandon_update(self, reason: str) -> None:
        self._vllm.make_dirty(reason)

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        """Hands a message to vLLM's ``init_weight_transfer_engine``; its ``kind`` chooses the engine that receives."""
        self._verified, self._staged_in_workers = None, False
        self._vllm.call(self._vllm.llm.init_weight_transfer_engine, {"init_info": init_info})

    def check_manifest(self, manifest: WeightManifest) -> None:
        self._vllm.serving.check("take weights")
        if manifest.version < self._vllm.serving.version:
            raise WeightVersionError(
                f"{self._vllm.name} serves weights of version {self._vllm.serving.version} and refuses the older version "
                f"{manifest.version}",
                engine=self._vllm.name,
                version=self._vllm.serving.version,
                offered=manifest.version,
            )
        check_manifest(manifest, self._vllm.expected, engine=self._vllm.name)

    def resume(self) -> None:
        self._vllm.serving.resume()
        self.resume_turns()

    def resume_turns(self) -> None:
        if self._vllm.serving.state == "serving":
            self._vllm.loop.release()

    def close(self) -> None:
        if self._own_segment is not None:
            segment, self._own_segment, self._held_push = self._own_segment, None, ""
            segment.close()
            self.forget_segment(str(segment.path))

    def _map(self, segment: Segment) -> Tensor:
        # Mapped here, where bytes are checked, and in the workers, which load them.
        if self._buffer is None or self._mapped != segment:
            self._buffer = map_segment(segment.path, segment.nbytes)
            self._mapped = segment
            self._staged_in_workers = False
        if not self._staged_in_workers:
            self.init_transfer({"kind": "staged", "path": segment.path, "nbytes": segment.nbytes})
            self._staged_in_workers = True
        return self._buffer

    def _start_weight_update(self) -> None:
        # Keys and values of the old weights would be reused for equal prefixes.
        if not self._vllm.llm.reset_prefix_cache():
            raise RolloutError(f"{self._vllm.name}: vLLM still has running requests, its prefix cache cannot be emptied")
        self._vllm.llm.start_weight_update()


def _receive_patch(group: GlooGroup, place: Tensor) -> None:
    table = empty_table(place)
    group.broadcast(table)
    payload = torch.empty(payload_bytes(place, table), dtype=torch.uint8)
    group.broadcast(payload)
    # One that cannot be applied leaves a tensor with another digest, which verify() refuses.
    with suppress(WeightCheckError):
        apply_patch(place, Patch(table, payload))
