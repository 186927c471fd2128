"""An engine's part in serving LoRA adapters: versions that are kept, loaded, and give way to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from actors.rollout.config import RolloutConfig
from actors.rollout.messages import AdapterVersion
from actors.rollout.weight_update import WeightReceiver
from actors.wire.factors import FactorMemories, PackedFactors, SharedFactors
from rl_backend.checkpoint.peft_files import read_peft_directory
from rl_backend.contracts import (
    RolloutError,
    UnsupportedError,
    WeightCheckError,
    WeightVersionError,
)
from rl_backend.contracts.lora import part_name


class AdapterReceiver(WeightReceiver):
    """What pushes of adapters call by name."""

    def __init__(self, config: RolloutConfig, engine: int, device: str) -> None:
        super().__init__(config, engine, device)
        self._kept: dict[int, AdapterVersion] = {}
        self._loaded: dict[int, AdapterVersion] = {}
        """Those in vLLM's slots, the one not used for longest first."""
        self._dropped: set[AdapterVersion] = set()
        """Those that requests still sample with."""
        self._shared: set[int] = set()
        """Those whose factors are in memory that is somebody else's again once they are dropped."""
        self._memories = FactorMemories()

    def push_adapter(self, adapter: AdapterVersion, factors: PackedFactors | SharedFactors | str, digest: str) -> None:
        """Checks an adapter, keeps it, and loads it beside the others; everything serves on.

        Args:
            factors: the scale multiplied into B; or a directory in peft's format.
            digest: of the factors where they come from.

        Raises:
            UnsupportedError: an engine that was started without adapters.
            CheckpointError: a directory that cannot be read here.
            WeightCheckError: what arrived is not what was sent, vLLM cannot load it, or its kernels read something else.
            WeightSyncError: shared memory that is not on this host.
        """
        self._check_updatable()
        if not self._config.max_adapters:
            raise UnsupportedError(
                f"{self._name} was started without adapters; set RolloutConfig.max_adapters", engine=self._name
            )
        if isinstance(factors, SharedFactors):
            self.keep_adapter(adapter, factors.tensors(self._memories), digest)
            self._shared.add(adapter.number)
        else:
            held = self._read(factors) if isinstance(factors, str) else factors
            self.keep_adapter(adapter, held.tensors(), digest)
        self.load_adapter(adapter)

    def keep_adapter(self, adapter: AdapterVersion, tensors: Mapping[str, Tensor], digest: str) -> None:
        """Keeps an adapter for as long as it is served, whether or not it has a slot.

        Args:
            digest: what a slot must have that it is loaded into, as :func:`~actors.wire.factors.factor_digest`.
        """
        arguments = (adapter.path, adapter.rank, tensors, digest)
        (problem,) = self._vllm_call(self._llm.collective_rpc, "keep_adapter", args=arguments)
        if problem:
            raise WeightCheckError(f"{self._name}: {adapter.name}: {problem}", engine=self._name)
        self._kept[adapter.number] = adapter

    def load_adapter(self, adapter: AdapterVersion) -> None:
        """Puts a kept adapter into one of vLLM's slots, where the one not used for longest gives way.

        Raises:
            WeightCheckError: what the kernels read is not what was sent.
        """
        self._loop.call(self._load_adapter, adapter)

    def _load_adapter(self, adapter: AdapterVersion) -> None:
        self._require_kept(adapter)
        if adapter.number in self._loaded:
            self._loaded[adapter.number] = self._loaded.pop(adapter.number)
            return
        in_use = {each.number for each in self._loop.adapters(running=True)}
        while len(self._loaded) > self._config.max_adapters:
            self._unload(next(number for number in self._loaded if number not in in_use))
        self._loaded[adapter.number] = adapter
        try:
            self._vllm_call(self._llm.llm_engine.add_lora, lora_request(adapter))
            arguments = (adapter.path, adapter.number)
            (problem,) = self._vllm_call(self._llm.collective_rpc, "adapter_problem", args=arguments)
            if problem:
                raise WeightCheckError(f"{self._name}: {adapter.name}: {problem}", engine=self._name)
        except Exception:
            self._unload(adapter.number)
            raise

    def drop_adapter(self, adapter: AdapterVersion) -> None:
        """Forgets an adapter, once no request that was made before samples with it.

        When this returns, nothing here reads the memory that the adapter was pushed in.
        """
        self._loop.call(self._drop_adapter, adapter)

    def _drop_adapter(self, adapter: AdapterVersion) -> None:
        shared = adapter.number in self._shared
        self._shared.discard(adapter.number)
        if adapter in self._loop.adapters(running=False):
            self._dropped.add(adapter)
            if shared:
                self._vllm_call(self._llm.collective_rpc, "own_adapter", args=(adapter.path,))
            return
        self._dropped.discard(adapter)
        if adapter.number in self._loaded:
            self._unload(adapter.number)
        if self._kept.pop(adapter.number, None) is not None:
            self._vllm_call(self._llm.collective_rpc, "forget_adapter", args=(adapter.path,))

    def finish_update(self, version: int) -> None:
        """See the base class. vLLM drops all adapters when the base changes, so those that were loaded are loaded again."""
        super().finish_update(version)
        loaded, self._loaded = list(self._loaded.values()), {}
        for adapter in loaded:
            self._during_update(self.load_adapter, adapter)

    def _take_slot(self, adapter: AdapterVersion) -> bool:
        """Loads an adapter for a request, where running ones leave a slot beside the one that pushes need. On the loop's
        thread.
        """
        self._require_kept(adapter)
        in_use = self._loop.adapters(running=True)
        if adapter not in in_use and len(in_use) >= self._config.max_adapters:
            return False
        self.load_adapter(adapter)
        return True

    def _leave_slot(self, adapter: AdapterVersion) -> None:
        """After a request that sampled with it."""
        if adapter in self._dropped:
            self._drop_adapter(adapter)

    def _require_kept(self, adapter: AdapterVersion) -> None:
        if adapter.number not in self._kept:
            raise RolloutError(f"{self._name} does not have {adapter.name}: push it", engine=self._name)

    def _require_version(self, adapter: AdapterVersion | None, required: int | None) -> None:
        version = self._version if adapter is None else adapter.version
        if required is not None and version < required:
            what = "weights of" if adapter is None else f"{adapter.tenant!r} at"
            raise WeightVersionError(
                f"{self._name} serves {what} version {version}, version {required} is required: push first",
                engine=self._name,
                version=version,
                required=required,
            )

    def _read(self, directory: str) -> PackedFactors:
        found: dict[str, tuple[Tensor, float]] = {}
        adapter = read_peft_directory(directory)
        for module, parts in adapter.parts.items():
            for part, tensor in parts.items():
                scale = adapter.scales[module] if part == "B" else 1.0
                found[part_name(module, adapter.kinds[module], part)] = tensor, scale
        return PackedFactors.of(found, self._config.dtype)

    def _unload(self, number: int) -> None:
        del self._loaded[number]
        self._vllm_call(self._llm.llm_engine.remove_lora, number)

    def _unload_all(self) -> None:
        """Before vLLM's memory goes; they are loaded again when they are used."""
        for number in list(self._loaded):
            self._unload(number)


def lora_request(adapter: AdapterVersion | None) -> Any:
    """What vLLM takes beside a prompt. It must not be imported before its environment is set."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.path)
