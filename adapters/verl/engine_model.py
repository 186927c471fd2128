"""The model of an engine: one that is trained itself, or a frozen one and the LoRA tenant that is trained instead."""

import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.engine.spec import BlockPlacement, ShardSpec, translate_flat_indices

from adapters.verl.options.lora import LoRASettings
from adapters.verl.options.settings import EngineSettings
from rl_backend.contracts import OptimizerConfig, UnsupportedError, WeightShard
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime import Runtime

# Bytes of weights gathered at one time; a larger weight is gathered alone.
_EXPORT_BYTES = 2**28

# Megatron-Bridge's names for the way in which create_lora_adapter draws A and B.
_PEFTS_INITIAL = ("kaiming", "zero")

type Exported = tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]
"""(name and tensor of each weight, verl's ``peft_config``)."""


class EngineModel:
    """A model and, with LoRA, the one tenant of it.

    Args:
        optimizer: None for a model that is not trained.
        hf_path: None takes that of the settings.

    Attributes:
        trained: the tenant, or the base where there is none.
        at_work: the model that batches run on: ``trained``, or the base inside :meth:`without_adapter`.

    Raises:
        ConfigError: targets of LoRA that the model does not have, before it is loaded.
    """

    def __init__(
        self, runtime: Runtime[Any], settings: EngineSettings, optimizer: OptimizerConfig | None, hf_path: str | None = None
    ) -> None:
        self._runtime = runtime
        self._lora = settings.lora
        self._optimizer = optimizer
        if self._lora is None:
            self.base = runtime.build_model(
                forward_only=settings.forward_only, head=settings.head, hf_path=hf_path, optimizer=optimizer
            )
            self.trained: Any = self.base
            self.at_work: Any = self.base
            return
        config = self._lora.for_model(hf_path or settings.runtime.hf_path)
        self.base = runtime.build_model(trainable=False, head=settings.head, hf_path=hf_path)
        self.trained = self.at_work = self._new_tenant(self._lora, config, self._lora.adapter_path)

    def _new_tenant(self, lora: LoRASettings, config: LoRAConfig, adapter_path: str | None) -> Any:
        tenant = self._runtime.create_lora_adapter(self.base, config, self._optimizer)
        try:
            if adapter_path is not None:
                self._runtime.import_lora_adapter(tenant, adapter_path)
            elif lora.initial != _PEFTS_INITIAL:
                whole = self._runtime.export_lora_adapter(tenant)
                self._runtime.import_lora_adapter(
                    tenant, {name: _initial(lora, config.seed, name, each) for name, each in whole}
                )
        except BaseException:
            self._runtime.remove_lora_adapter(tenant)
            raise
        return tenant

    def renew_tenant(self, adapter_path: str) -> None:
        """Starts training anew from an adapter in peft's format. An error leaves the tenant as it was, and no other."""
        assert self._lora is not None, "a model with a tenant"
        tenant = self._new_tenant(self._lora, self.trained.lora, adapter_path)
        try:
            self._runtime.remove_lora_adapter(self.trained)
        except BaseException:
            # A save of the old tenant failed, and the runtime keeps it: it is trained on, and saved again.
            self._runtime.remove_lora_adapter(tenant)
            raise
        self.trained = self.at_work = tenant

    @contextmanager
    def without_adapter(self) -> Generator[None]:
        before, self.at_work = self.at_work, self.base
        try:
            yield
        finally:
            self.at_work = before

    def move(self, where: Literal["cpu", "device"], *, model: bool, optimizer: bool, grad: bool) -> None:
        if model and self.trained is not self.base:
            self._runtime.to(self.base, where, model=True, optimizer=False, grad=False)
        if model or optimizer or grad:
            self._runtime.to(self.trained, where, model=model, optimizer=optimizer, grad=grad)

    def for_rollout(self, dtype: torch.dtype, *, base_sync_done: bool | None) -> Exported:
        """Tensors for verl's rollouts.

        Args:
            base_sync_done: of an adapter that is not merged, whether the rollout has the base already and gets the adapter
                by peft's names; else it gets the base. None where the receiver has no place for an adapter.

        Raises:
            UnsupportedError: such a receiver, or an adapter with DoRA, which rollouts do not serve.
        """
        if self._lora is None or self._lora.merge:
            return self._weights(self.trained, dtype), None
        # verl's fully asynchronous trainer comes here without the checks of a run's configuration.
        if base_sync_done is None or self._lora.config.use_dora:
            raise UnsupportedError(
                "HFModelConfig.lora.merge=False: checkpoint engines other than naive send whole weights only, and rollouts "
                "serve no DoRA adapters; set lora.merge=True"
            )
        peft_config = self._lora.for_rollout()
        if not base_sync_done:
            return self._weights(self.base, dtype), peft_config
        factors = self._runtime.export_lora_adapter(self.trained)
        return ((name, tensor.to(dtype)) for name, tensor in factors), peft_config

    def _weights(self, handle: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        largest = max(each.nbytes for each in self._runtime.weight_infos(handle, dtype=dtype))
        return self._runtime.export_weights(handle, dtype=dtype, byte_budget=max(_EXPORT_BYTES, largest))

    def shards(self, dtype: torch.dtype) -> Iterator[WeightShard]:
        """This rank's share of every weight (:meth:`~rl_backend.runtime.Runtime.export_shards`)."""
        if self._lora is not None:
            raise UnsupportedError(
                "HFModelConfig.lora: delta_sharded sends shares of weights that are trained themselves; set "
                "rollout.checkpoint_engine.backend=naive, or another one and lora.merge=True"
            )
        return self._runtime.export_shards(self.trained, dtype=dtype)


def _initial(lora: LoRASettings, seed: int, name: str, given: Tensor) -> Tensor:
    """A whole factor as Megatron-Bridge starts one; tensors that are not A or B stay as given."""
    is_b = ".lora_B." in name
    if not is_b and ".lora_A." not in name:
        return given
    # By name, so that a factor is the same in every layout.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    factor = torch.zeros(given.shape)
    match lora.initial[is_b]:
        case "xavier":
            torch.nn.init.xavier_normal_(factor, generator=generator)
        case "kaiming":
            torch.nn.init.kaiming_uniform_(factor, a=5**0.5, generator=generator)
        case "normal":
            torch.nn.init.normal_(factor, std=0.2, generator=generator)
    return factor


type DeltaEntry = tuple[list[tuple[str, tuple[int, ...]]], str, Tensor, Tensor, Tensor]
"""(names and shapes, dtype, (1,) number of changes, their places in the whole weight, their values)."""


def shards_with_specs(shards: Iterator[WeightShard]) -> Iterator[tuple[str, Tensor, ShardSpec]]:
    """verl's ``(name, local shard, ShardSpec)``: each share is a block of a weight under its final name."""
    for name, shape, offset, tensor in shards:
        spec = ShardSpec(
            full_shape=shape,
            place=BlockPlacement(tuple(tensor.shape), offset, shape),
            gather_group=dist.group.WORLD,
            contributes=tensor.numel() > 0,
        )
        yield name, tensor, spec


def delta_entry(name: str, spec: ShardSpec, place: Any, places_in_shard: Tensor, values: Tensor) -> DeltaEntry:
    places = translate_flat_indices(places_in_shard, place) if places_in_shard.numel() else places_in_shard
    counts = torch.tensor([places.numel()], dtype=torch.int64)
    return [(name, spec.full_shape)], str(values.dtype).removeprefix("torch."), counts, places.to(torch.int32), values
