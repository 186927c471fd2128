"""LoRA tenants of a training group: made, listed, exported and removed; every other operation takes their handles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from actors.train.context import HandleRef
from actors.train.future import GroupFuture, operation
from rl_backend.contracts import Head, OptimizerConfig
from rl_backend.contracts.backend_info import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.contracts.lora import LoRAConfig, LoRAInfo


class TenantOperations:
    """What :class:`~actors.train.group.TrainGroup` does with tenants of a model of ``build_model(trainable=False)``."""

    if TYPE_CHECKING:
        submit: Callable[..., GroupFuture[Any]]

    @operation
    def create_lora_adapter(
        self,
        handle: HandleRef,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str = "",
        head: Head | None = None,
    ) -> GroupFuture[HandleRef]:
        """As :meth:`~rl_backend.runtime.Runtime.create_lora_adapter`, on every rank."""
        return self.submit("create_lora_adapter", handle=handle, lora=lora, optimizer=optimizer, name=name, head=head)

    @operation
    def remove_lora_adapter(self, handle: HandleRef) -> GroupFuture[None]:
        """Frees a tenant; its handle cannot be used again."""
        return self.submit("remove_lora_adapter", handle=handle)

    @operation
    def list_lora_adapters(self, handle: HandleRef) -> GroupFuture[list[LoRAInfo]]:
        """The tenants of a model, as rank 0 sees them."""
        return self.submit("list_lora_adapters", handle=handle)

    @operation
    def get_optimizer_state(self, handle: HandleRef) -> GroupFuture[OptimizerState]:
        """As :meth:`~rl_backend.runtime.Runtime.get_optimizer_state`."""
        return self.submit("get_optimizer_state", handle=handle)

    @operation
    def list_optimizer_states(self, handle: HandleRef) -> GroupFuture[list[OptimizerStateInfo]]:
        """As :meth:`~rl_backend.runtime.Runtime.list_optimizer_states`; ``bytes`` are those of rank 0."""
        return self.submit("list_optimizer_states", handle=handle)

    @operation
    def get_backend_info(self, handle: HandleRef) -> GroupFuture[BackendInfo]:
        """As :meth:`~rl_backend.runtime.Runtime.get_backend_info`, of rank 0."""
        return self.submit("get_backend_info", handle=handle)

    @operation
    def export_lora_adapter(self, handle: HandleRef) -> GroupFuture[dict[str, Tensor]]:
        """Whole factors by peft's names, float32, on the CPU."""
        return self.submit("export_lora_adapter", handle=handle)

    @operation
    def import_lora_adapter(
        self, handle: HandleRef, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Path | str
    ) -> GroupFuture[None]:
        """As :meth:`~rl_backend.runtime.Runtime.import_lora_adapter`; all is checked before anything changes.

        Args:
            tensors: also a directory in peft's format that every rank can read.
        """
        given = str(Path(tensors).absolute()) if isinstance(tensors, Path | str) else dict(tensors)
        return self.submit("import_lora_adapter", handle=handle, tensors=given)
