"""LoRA tenants of a group of engines: their versions, the shared memory of their factors, and what joining engines get."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

import ray

from actors.rollout.group.calls import collect
from actors.rollout.group.engines import EngineSet, are_on_node, engine_name, raise_failures
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter
from actors.wire.factors import FactorMemories, SharedFactors
from actors.wire.segment import DIRECTORY, Segment, SharedSegment, host_identity
from rl_backend.contracts import BatchError, RolloutError, WeightSyncError, WeightVersionError

# Segments that are kept for the next pushes: new memory takes the system longer to give than factors take to copy.
_MOST_SPARE = 2
# Of /dev/shm that stays free: Ray's store takes its pages there as it fills, and pushes of weights theirs.
_FREE_SHARE = 0.5


class AdapterMemory:
    """Segments, each with the factors of one version for as long as an engine may read them."""

    def __init__(self) -> None:
        # They are the driver's: engines that start later read what is served, whatever has become of the trainer.
        self._lock = threading.Lock()
        self._in_use: dict[str, SharedSegment] = {}
        # No longer served, and the calls after whose end no engine reads them.
        self._read: list[tuple[SharedSegment, list[Any]]] = []
        self._spare: list[SharedSegment] = []
        self._closed = False

    def take(self, nbytes: int) -> Segment:
        """At least ``nbytes``, to be written to; raises :class:`WeightSyncError` where /dev/shm has no room to spare."""
        with self._lock:
            self._collect()
            fitting = [segment for segment in self._spare if segment.nbytes >= nbytes]
            segment = min(fitting, key=lambda segment: segment.nbytes, default=None)
            if segment is None:
                space = os.statvfs(DIRECTORY)
                free = space.f_bavail * space.f_frsize - nbytes
                # Of a closed group nobody would remove the segment.
                if self._closed or free < _FREE_SHARE * space.f_blocks * space.f_frsize:
                    left = f"{free / 2**20:.0f} MiB free, less than {_FREE_SHARE:.0%} of it"
                    raise WeightSyncError(f"/dev/shm would have {left}, or the rollout group is closed")
                segment = SharedSegment(nbytes)
            else:
                self._spare.remove(segment)
            self._in_use[str(segment.path)] = segment
            return Segment(str(segment.path), segment.nbytes)

    def give_back(self, path: str, calls: Collection[Any]) -> None:
        """Of a segment that nobody reads after these calls of engines have ended."""
        with self._lock:
            segment = self._in_use.pop(path, None)
            if segment is not None:  # or all were removed in the meantime
                self._read.append((segment, list(calls)))
                self._collect()

    def discard(self, path: str) -> None:
        """Of a segment that somebody may still write to: it is not used again."""
        with self._lock:
            segment = self._in_use.pop(path, None)
            if segment is not None:
                segment.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for segment in (*self._in_use.values(), *(segment for segment, _ in self._read), *self._spare):
                segment.close()
            self._in_use, self._read, self._spare = {}, [], []

    def _collect(self) -> None:
        spare, still_read = list(self._spare), []
        for segment, calls in self._read:
            # Ray counts a call of an engine that has died as ended.
            if calls and ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False)[1]:
                still_read.append((segment, calls))
            else:
                spare.append(segment)
        # At once: an interrupted wait must not leave a segment in both.
        self._read, self._spare = still_read, spare
        while len(self._spare) > _MOST_SPARE:
            self._spare.pop(0).close()


class AdapterPusher(Protocol):
    @property
    def is_over(self) -> bool:
        """Whether it can push no more: its training group has ended."""


class GroupAdapters:
    """The adapters of a group of engines. Pushes leave factors for engines on this process's host in ``memory``."""

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._pushed: dict[str, PushedAdapter] = {}
        # Name of a tenant -> which one it is, and what pushes it: a name is free when its pusher is gone.
        self._pushers: dict[str, tuple[Hashable, ref[AdapterPusher]]] = {}
        self.memory = AdapterMemory()
        self._merged = ""
        self.base_pushes = 0

    @property
    def served(self) -> dict[str, AdapterVersion]:
        return {tenant: pushed.adapter for tenant, pushed in self._pushed.items()}

    def remove(self, tenant: str) -> None:
        with self._engines.changing:
            with self._engines.lock:
                adapter = self._version(tenant)
                pushed = self._pushed.pop(tenant)
                self._pushers.pop(tenant, None)
            self._engines.wait_for_calls()
            calls: dict[int, Any] = {}
            try:
                calls = self._engines.start_call("drop_adapter", adapter)
                raise_failures(self._engines.gather(calls))
            finally:
                self.free(pushed, calls.values())

    def require_pushable(self, adapter: AdapterVersion) -> None:
        self.require_plain_base(adapter.tenant)
        served = self.served.get(adapter.tenant)
        if served is not None and served.version > adapter.version:
            raise WeightVersionError(
                f"the engines serve {adapter.tenant!r} at version {served.version} and refuse the older version "
                f"{adapter.version}; to go back, remove_adapter() first",
                version=served.version,
                offered=adapter.version,
            )

    def require_same_tenant(self, name: str, tenant: Hashable, pusher: AdapterPusher) -> None:
        """Gives the name to a tenant; raises :class:`RolloutError` where another one of that name is still pushed."""
        held = self._pushers.get(name)
        if held is not None and held[0] != tenant:
            other = held[1]()
            if other is not None and not other.is_over:
                raise RolloutError(
                    f"another tenant called {name!r}, of another training group or made anew, is pushed to these engines; "
                    "give tenants unique names, or close() the WeightSync of the other one",
                    tenant=name,
                )
        self._pushers[name] = tenant, ref(pusher)

    def release_name(self, name: str, pusher: AdapterPusher) -> None:
        if (held := self._pushers.get(name)) is not None and held[1]() is pusher:
            del self._pushers[name]

    def require_plain_base(self, tenant: str) -> None:
        if self._merged:
            raise RolloutError(
                f"adapter={tenant!r}: the engines serve weights with {self._merged!r} merged into them, beside which no "
                "adapter is right; push the base model, after forget_weights() if its version is older",
                tenant=tenant,
                merged=self._merged,
            )

    def switch(self, pushed: PushedAdapter) -> PushedAdapter | None:
        """New requests of its tenant sample with ``pushed``, which every engine has; returns the version before."""
        with self._engines.lock:
            before = self._pushed.get(pushed.adapter.tenant)
            self._pushed[pushed.adapter.tenant] = pushed
        return before

    def is_on_node(self, node_id: str, host: str) -> bool:
        if ray.get_runtime_context().get_node_id() != node_id or host_identity() != host:
            return False
        return are_on_node(self._engines, node_id, host)

    def sent_to(self, pushed: PushedAdapter, info: EngineInfo) -> PushedAdapter:
        if not isinstance(pushed.factors, SharedFactors) or info.host == host_identity():
            return pushed
        return pushed._replace(factors=pushed.factors.packed(FactorMemories(), pushed.digest))

    def free(self, pushed: PushedAdapter, calls: Collection[Any]) -> None:
        if isinstance(pushed.factors, SharedFactors):
            self.memory.give_back(pushed.factors.segment.path, calls)
        elif isinstance(pushed.factors, str):
            shutil.rmtree(pushed.factors, ignore_errors=True)

    def base_changed(self, merged: str) -> None:
        """Engines have been given other weights, with the adapter of the tenant ``merged`` in them if it has a name."""
        self._merged = merged
        self.base_pushes += 1

    def chosen(self, adapter: str | Sequence[str | None] | None, prompts: int) -> list[AdapterVersion | None]:
        """The version of each prompt's tenant, None for the weights alone. To be called with the lock of calls."""
        names = [adapter] * prompts if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != prompts:
            raise BatchError(f"adapter has {len(names)} names for {prompts} prompts; give one, or one for each prompt")
        chosen = [None if name is None else self._version(name) for name in names]
        for each in chosen:
            if each is not None:
                self.require_plain_base(each.tenant)
        return chosen

    def version_of(self, tenant: str | None) -> AdapterVersion | None:
        """The version of a tenant that turns sample with from now on; None for the weights alone."""
        return self.chosen(tenant, 1)[0]

    def bring(self, actors: Mapping[int, Any], infos: Mapping[int, EngineInfo]) -> None:
        names = {engine: engine_name(engine) for engine in actors}
        # Each is loaded once, and compared with what was sent: an engine that joins is as sure as those that serve.
        for pushed in self._pushed.values():
            calls = {
                engine: actor.push_adapter.remote(*self.sent_to(pushed, infos[engine])) for engine, actor in actors.items()
            }
            raise_failures(collect(calls, names, self._engines.config.start_timeout))

    def _version(self, tenant: str) -> AdapterVersion:
        if tenant not in self._pushed:
            known = ", ".join(sorted(self._pushed)) or "none"
            raise RolloutError(f"adapter={tenant!r} has not been pushed to these engines; there are {known}", tenant=tenant)
        return self._pushed[tenant].adapter
