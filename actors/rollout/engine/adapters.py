"""LoRA adapters of an engine: pushed and kept, loaded into vLLM's slots when they are used, dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from actors.rollout.engine.in_process import VllmInProcess, lora_request
from actors.rollout.messages import AdapterVersion
from actors.wire.factors import FactorMemories, PackedFactors, SharedFactors
from rl_backend.contracts import RolloutError, WeightCheckError


class AdapterStore:
    def __init__(self, vllm: VllmInProcess) -> None:
        self._vllm = vllm
        self._kept: dict[int, AdapterVersion] = {}
        # Those in vLLM's slots, the one not used for longest first: it gives way.
        self._loaded: dict[int, AdapterVersion] = {}
        # Those that requests still sample with.
        self._dropped: set[AdapterVersion] = set()
        # Those with factors in memory that goes back to its owner once they are dropped.
        self._shared: set[int] = set()
        self._memories = FactorMemories()

    def push(self, adapter: AdapterVersion, factors: PackedFactors | SharedFactors | str, digest: str) -> None:
        """Checks an adapter, keeps it and loads it next to the others, while the engine keeps serving.

        Raises:
            CheckpointError: a directory that cannot be read here.
            WeightCheckError: what arrived is not what was sent, vLLM cannot load it, or its kernels read something
                else.
            WeightSyncError: shared memory that is not on this host.
        """
        self._vllm.serving.check("take weights")
        if isinstance(factors, SharedFactors):
            self.keep(adapter, factors.tensors(self._memories), digest)
            self._shared.add(adapter.number)
        else:
            held = PackedFactors.read(factors, self._vllm.config.dtype) if isinstance(factors, str) else factors
            self.keep(adapter, held.tensors(), digest)
        self.load(adapter)

    def keep(self, adapter: AdapterVersion, tensors: Mapping[str, Tensor], digest: str) -> None:
        if self._vllm.config.tensor_parallel > 1:
            # Workers are other processes, and a pickled view takes what it is a view of along.
            tensors = {name: factor.clone() for name, factor in tensors.items()}
        self._check(adapter, "keep_adapter", adapter.path, adapter.rank, tensors, digest)
        self._kept[adapter.number] = adapter

    def load(self, adapter: AdapterVersion) -> None:
        self._vllm.loop.call(self._load, adapter)

    def drop(self, adapter: AdapterVersion) -> None:
        """Forgets an adapter, and the memory that it was pushed in, once no request that was made before samples with it."""
        self._vllm.loop.call(self._drop, adapter)

    def load_again(self) -> None:
        # vLLM drops all adapters when the base changes.
        loaded, self._loaded = list(self._loaded.values()), {}
        for adapter in loaded:
            self._vllm.during_update(self.load, adapter)

    def take_slot(self, adapter: AdapterVersion) -> bool:
        """Loads an adapter for a request, unless running requests leave only the slot that pushes need."""
        self._require_kept(adapter)
        in_use = self._vllm.loop.adapters(running=True)
        if adapter not in in_use and len(in_use) >= self._vllm.config.max_adapters:
            return False
        self.load(adapter)
        return True

    def leave_slot(self, adapter: AdapterVersion) -> None:
        if adapter in self._dropped:
            self._drop(adapter)

    def unload_all(self) -> None:
        for number in list(self._loaded):
            self._unload(number)

    def _load(self, adapter: AdapterVersion) -> None:
        self._require_kept(adapter)
        if adapter.number in self._loaded:
            self._loaded[adapter.number] = self._loaded.pop(adapter.number)
            return
        in_use = {each.number for each in self._vllm.loop.adapters(running=True)}
        while len(self._loaded) > self._vllm.config.max_adapters:
            self._unload(next(number for number in self._loaded if number not in in_use))
        self._loaded[adapter.number] = adapter
        try:
            self._vllm.call(self._vllm.llm.llm_engine.add_lora, lora_request(adapter))
            self._check(adapter, "adapter_problem", adapter.path, adapter.number)
        except Exception:
            self._unload(adapter.number)
            raise

    def _drop(self, adapter: AdapterVersion) -> None:
        shared = adapter.number in self._shared
        self._shared.discard(adapter.number)
        if adapter in self._vllm.loop.adapters(running=False):
            self._dropped.add(adapter)
            if shared:
                # Its memory goes back now, and the next version is written there.
                self._vllm.ask_workers("own_adapter", adapter.path)
            return
        self._dropped.discard(adapter)
        if adapter.number in self._loaded:
            self._unload(adapter.number)
        if self._kept.pop(adapter.number, None) is not None:
            self._vllm.ask_workers("forget_adapter", adapter.path)

    def _check(self, adapter: AdapterVersion, method: str, *args: Any) -> None:
        if problem := next(filter(None, self._vllm.ask_workers(method, *args)), ""):
            raise WeightCheckError(f"{self._vllm.name}: {adapter.name}: {problem}", engine=self._vllm.name)

    def _require_kept(self, adapter: AdapterVersion) -> None:
        if adapter.number not in self._kept:
            raise RolloutError(f"{self._vllm.name} does not have {adapter.name}: push it", engine=self._vllm.name)

    def _unload(self, number: int) -> None:
        del self._loaded[number]
        self._vllm.call(self._vllm.llm.llm_engine.remove_lora, number)
