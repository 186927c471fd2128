"""LoRA tenants of a group of engines: the version that each is served at, and what engines that join are given."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

import ray

from actors.rollout.adapter_memory import AdapterMemory
from actors.rollout.calls import collect
from actors.rollout.engines import EngineSet, are_on_node, engine_name, raise_first
from actors.rollout.messages import AdapterVersion, EngineInfo, PushedAdapter
from actors.wire.factors import FactorMemories, SharedFactors
from actors.wire.segment import host_identity
from rl_backend.contracts import BatchError, RolloutError, WeightVersionError


class AdapterPusher(Protocol):
    """What pushes a tenant's adapters."""

    @property
    def is_over(self) -> bool:
        """Whether it can push no more: its training group has ended."""


class AdapterGroup(EngineSet):
    """What :class:`~actors.rollout.group.RolloutGroup` does with adapters.

    Attributes:
        base_pushes: of weights to these engines, by which adapters know that what they stand beside has changed.
        last_sync: key of the last push of weights, whichever way they took.
        adapter_memory: where pushes leave factors for engines on this process's host.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._adapters: dict[str, PushedAdapter] = {}
        self._pushers: dict[str, tuple[Hashable, ref[AdapterPusher]]] = {}
        """Name of a tenant -> which one it is, and what pushes it."""
        self.adapter_memory = AdapterMemory()
        self._merged = self.last_sync = ""
        self.base_pushes = 0

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        """The version of each tenant that new requests sample with."""
        return {tenant: pushed.adapter for tenant, pushed in self._adapters.items()}

    def remove_adapter(self, tenant: str) -> None:
        """Refuses requests for a tenant from now on, and frees its adapter in every engine."""
        with self._changing:
            with self._lock:
                adapter = self._served(tenant)
                pushed = self._adapters.pop(tenant)
                self._pushers.pop(tenant, None)
            calls: dict[int, Any] = {}
            try:
                calls = self.start_call("drop_adapter", adapter)
                raise_first(self.gather(calls))
            finally:
                self.free_factors(pushed, calls.values())

    @contextmanager
    def changing_adapters(self) -> Iterator[None]:
        """For one push: no other one, no update of the weights and no engine that joins comes between."""
        with self._changing:
            yield

    def require_pushable(self, adapter: AdapterVersion) -> None:
        """Refuses to go back, and what :meth:`require_plain_base` refuses.

        Raises:
            WeightVersionError: a newer version of the tenant is served.
        """
        self.require_plain_base(adapter.tenant)
        served = self.adapters.get(adapter.tenant)
        if served is not None and served.version > adapter.version:
            raise WeightVersionError(
                f"the engines serve {adapter.tenant!r} at version {served.version} and refuse the older version "
                f"{adapter.version}; to go back, remove_adapter() first",
                version=served.version,
                offered=adapter.version,
            )

    def require_same_tenant(self, name: str, tenant: Hashable, pusher: AdapterPusher) -> None:
        """Refuses a tenant under the name of another one that is still pushed; else the name is this tenant's.

        Args:
            tenant: the same for all that push it.

        Raises:
            RolloutError: requests of the other tenant would sample with this one.
        """
        held = self._pushers.get(name)
        if held is not None and held[0] != tenant:
            other = held[1]()
            if other is not None and not other.is_over:
                raise RolloutError(
                    f"another tenant called {name!r}, of another training group or made anew, is pushed to these engines; "
                    "give tenants names of their own, or close() the WeightSync of the other one",
                    tenant=name,
                )
        self._pushers[name] = tenant, ref(pusher)

    def release_name(self, name: str, pusher: AdapterPusher) -> None:
        """Lets another tenant have the name."""
        if (held := self._pushers.get(name)) is not None and held[1]() is pusher:
            del self._pushers[name]

    def require_plain_base(self, tenant: str) -> None:
        """Raises :class:`~rl_backend.contracts.RolloutError` where the engines' weights have an adapter merged into them."""
        if self._merged:
            raise RolloutError(
                f"adapter={tenant!r}: the engines serve weights with {self._merged!r} merged into them, beside which no "
                "adapter is right; push the base model, after forget_weights() if its version is older",
                tenant=tenant,
                merged=self._merged,
            )

    def switch_adapter(self, pushed: PushedAdapter) -> PushedAdapter | None:
        """New requests of its tenant sample with ``pushed``, which every engine has; returns the version before."""
        with self._lock:
            before = self._adapters.get(pushed.adapter.tenant)
            self._adapters[pushed.adapter.tenant] = pushed
        return before

    def is_on_node(self, node_id: str, host: str) -> bool:
        """Whether this process and all living engines are on that Ray node and share its /dev/shm."""
        if ray.get_runtime_context().get_node_id() != node_id or host_identity() != host:
            return False
        return are_on_node(self, node_id, host)

    def sent_to(self, pushed: PushedAdapter, info: EngineInfo) -> PushedAdapter:
        """As that engine can read it: what is in shared memory goes through Ray to another host."""
        if not isinstance(pushed.factors, SharedFactors) or info.host == host_identity():
            return pushed
        return pushed._replace(factors=pushed.factors.packed(FactorMemories(), pushed.digest))

    def free_factors(self, pushed: PushedAdapter, calls: Collection[Any]) -> None:
        """Of a version that is served no more, once these calls have dropped it from all engines."""
        if isinstance(pushed.factors, SharedFactors):
            self.adapter_memory.give_back(pushed.factors.segment.path, calls)
        elif isinstance(pushed.factors, str):
            shutil.rmtree(pushed.factors, ignore_errors=True)

    def base_changed(self, merged: str) -> None:
        """Engines have been given other weights.

        Args:
            merged: the tenant whose adapter is a part of them. No adapter is served beside such weights.
        """
        self._merged = merged
        self.base_pushes += 1

    def _served(self, tenant: str) -> AdapterVersion:
        if tenant not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise RolloutError(f"adapter={tenant!r} has not been pushed to these engines; there are {known}", tenant=tenant)
        return self._adapters[tenant].adapter

    def _chosen(self, adapter: str | Sequence[str | None] | None, prompts: int) -> list[AdapterVersion | None] | None:
        """The version of each prompt's tenant; None without any. To be called with the lock of requests."""
        if adapter is None:
            return None
        names = [adapter] * prompts if isinstance(adapter, str) else list(adapter)
        if len(names) != prompts:
            raise BatchError(f"adapter has {len(names)} names for {prompts} prompts; give one, or one for each prompt")
        chosen = [None if name is None else self._served(name) for name in names]
        for each in chosen:
            if each is not None:
                self.require_plain_base(each.tenant)
        return chosen

    def _bring_adapters(self, actors: Mapping[int, Any], infos: Mapping[int, EngineInfo]) -> None:
        """Gives engines that are about to join every tenant; each is loaded once, and compared with what was sent."""
        names = {engine: engine_name(engine) for engine in actors}
        for pushed in self._adapters.values():
            calls = {
                engine: actor.push_adapter.remote(*self.sent_to(pushed, infos[engine])) for engine, actor in actors.items()
            }
            raise_first(collect(calls, names, self.config.start_timeout))
