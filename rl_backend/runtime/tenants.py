"""LoRA tenants of a runtime: made, listed, run together and removed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_backend.checkpoint.training_state import on_every_rank
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    Losses,
    ModelHandle,
    OptimizerConfig,
    PackedBatch,
    StepResult,
)
from rl_backend.contracts.lora import LORA_FIELD, PEFT_PREFIX, LoRAConfig, LoRAInfo, part_name
from rl_backend.lora.modules import modules_of_rank, require_trainable, select_modules
from rl_backend.lora.rows import RowTensor, TenantRows, factors_of, head_parameters
from rl_backend.runtime.adaptable import RowGroups
from rl_backend.runtime.engine import GuardedHandle
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.router_replay import RouterReplay
from rl_backend.runtime.tenant import TenantHandle, require_tenant, step_tenants
from rl_backend.runtime.tenant_optimizer import TenantOptimizer
from rl_backend.runtime.tenant_pass import LossOfTenants, PassTenants, agree_on_failures, metrics_by_name, results_of_tenants
from rl_backend.runtime.tensor_atoms import TensorAtoms


class TenantRuntime[H: GuardedHandle](TensorAtoms[H]):
    """The part of a guarded runtime that knows tenants."""

    _num_tenants: int

    def create_lora_adapter(
        self,
        handle: H,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str = "",
        head: Head | None = None,
    ) -> TenantHandle:
        self._require(handle, "create_lora_adapter")
        adaptable = handle.adaptable
        if adaptable is None:
            raise HandleError(
                f"create_lora_adapter on {handle.name!r}, which is trained itself or has no layers to adapt; build it with "
                "build_model(trainable=False)",
                handle=handle.name,
            )
        name = name or f"tenant-{self._num_tenants}"
        if any(tenant.name == name and tenant.model is handle for tenant in self._tenants.values()):
            raise ConfigError.of("name", name, f"{handle.name!r} has a tenant of this name; choose another one")
        head = head or handle.head
        require_tenant(handle, adaptable, head)
        modules = select_modules(lora, adaptable.kinds)
        require_trainable(lora, modules, adaptable.kinds)
        tensors = [each for module in modules_of_rank(modules, adaptable.held) for each in factors_of(module, lora)]
        own_head = head_parameters(adaptable.value_head) if head == "values" and adaptable.value_head is not None else ()
        tensors += own_head if adaptable.holds_head else ()
        groups = RowGroups.of(adaptable, handle.groups.dp_size)
        initial = self._initial_head(handle, own_head) | self._initial_magnitudes(handle, lora, modules)
        # A rank without memory for it must not leave the others with one tenant more, whose numbers would be others.
        with on_every_rank(handle.groups.host_group, f"the adapter {name!r} could not be made", HandleError):
            rows = TenantRows.new(lora, tensors, handle.groups.device, initial, groups.sum_over_inputs)
        optimizer = optimizer or handle.config.backend_cfg.optimizer
        tenant = TenantHandle(
            name=name,
            forward_only=False,
            weight_version=0,
            head=head,
            data_parallel_rank=handle.data_parallel_rank,
            data_parallel_size=handle.data_parallel_size,
            micro_batch_multiple=handle.micro_batch_multiple,
            base=handle,
            lora_id=self._num_tenants,
            owner=self,
            config=handle.config,
            hf_config=handle.hf_config,
            kept=handle.kept,
            vocab_size=handle.vocab_size,
            max_length=handle.max_length,
            optimizer=TenantOptimizer(optimizer, rows, groups),
            groups=handle.groups,
            model=handle,
            lora=lora,
            modules=modules,
            rows=rows,
        )
        self._bit_exact(handle)
        self._num_tenants += 1
        self._tenants[tenant.lora_id] = tenant
        return tenant

    def _initial_head(self, base: H, parameters: Sequence[RowTensor]) -> dict[str, Tensor]:
        """As a critic starts: with the head of the base, or with zeros beside a language-model head. A collective."""
        if base.head == "values" and parameters:
            stored = self.export_weights(base, dtype=torch.float32, names=VALUE_HEAD_WEIGHTS)
            return {PEFT_PREFIX + name: tensor.clone() for name, tensor in stored}
        return {each.name: torch.zeros(each.size) for each in parameters}

    def _initial_magnitudes(self, base: H, lora: LoRAConfig, modules: Sequence[str]) -> dict[str, Tensor]:
        """Those of the base's weights, with which DoRA leaves them as they are. A collective."""
        if not lora.use_dora:
            return {}
        stored = self.export_weights(base, dtype=torch.float32, names=[f"{module}.weight" for module in modules])
        norms = ((name.removesuffix(".weight"), torch.linalg.vector_norm(tensor, dim=1)) for name, tensor in stored)
        return {part_name(module, "attention", "magnitude"): norm for module, norm in norms}

    def remove_lora_adapter(self, handle: ModelHandle) -> None:
        tenant = self._tenant(handle, "remove_lora_adapter")
        del self._tenants[tenant.lora_id]
        tenant.release()

    def list_lora_adapters(self, handle: H) -> list[LoRAInfo]:
        self._require(handle, "list_lora_adapters")
        return [tenant.info() for tenant in self._tenants.values() if tenant.model is handle]

    def _step_tenants(self, handles: Sequence[ModelHandle]) -> list[StepResult]:
        """One step of each; all are checked before any."""
        if not handles:
            raise HandleError("optimizer_step of no tenants; give at least one")
        tenants = [self._tenant(handle, "optimizer_step") for handle in handles]
        if len(set(tenants)) < len(tenants):
            twice = next(each.name for each in tenants if tenants.count(each) > 1)
            raise HandleError(f"optimizer_step of {twice!r} twice in one list; give each tenant once", handle=twice)
        results = step_tenants(tenants)
        for tenant, result in zip(tenants, results, strict=True):
            tenant.weight_version += result.ok
        return results

    @staticmethod
    def _is_mixed(handle: GuardedHandle, data: Sequence[PackedBatch], losses: Losses | None) -> bool:
        """Whether each sequence says, or has to say, whose it is."""
        has_field = any(LORA_FIELD in batch.sequence_fields for batch in data)
        return handle.adaptable is not None and (has_field or isinstance(losses, Mapping))

    def _run(
        self,
        handle: H,
        data: Sequence[PackedBatch],
        loss: Losses | None,
        *,
        forward_only: bool,
        router_replay: RouterReplay,
    ) -> ForwardResult:
        """A pass of one model or one tenant."""
        if isinstance(loss, Mapping):
            raise BatchError(f"several losses for {handle.name!r} without sequences of LoRA tenants; pass one")
        request = PassRequest(data, loss, forward_only, router_replay)
        if isinstance(handle, TenantHandle):
            return self._run_tenant(handle, request)
        return self._run_passes(handle, request)

    def _run_tenant(self, handle: TenantHandle, request: PassRequest) -> ForwardResult:
        """A pass whose sequences are all this tenant's."""
        tenants = _sole(handle, request)
        try:
            return self._run_passes(handle.model, request._replace(adapters=tenants))  # type: ignore[arg-type]
        except BaseException:
            self._break_trained(tenants, request.data)
            raise

    @staticmethod
    def _pass_of_model(handle: Any, request: PassRequest) -> tuple[Any, PassRequest]:
        """The model of a handle, and a pass of it whose sequences are all the handle's."""
        if not isinstance(handle, TenantHandle):
            return handle, request
        return handle.model, request._replace(adapters=_sole(handle, request))

    def _run_tenants(
        self,
        handle: H,
        data: Sequence[PackedBatch],
        losses: Losses | None,
        *,
        forward_only: bool,
        router_replay: RouterReplay,
    ) -> ForwardResult:
        """A pass of sequences of several tenants, and of the base alone."""
        if losses is not None and not isinstance(losses, Mapping):
            raise BatchError(f"one loss for the sequences of several tenants of {handle.name!r}; pass one for each, by name")
        mine = {key: tenant for key, tenant in self._tenants.items() if tenant.model is handle}
        names = {tenant.name for tenant in mine.values()}
        if losses is not None and (unknown := sorted(losses.keys() - names)):
            raise BatchError(f"loss_fn has {unknown[0]!r}, which is no tenant of {handle.name!r}; there are {sorted(names)}")
        heads = sorted({handle.head, *(tenant.head for tenant in mine.values())})
        tenants = PassTenants(mine, trains=not forward_only, heads=heads, losses=losses or ())
        for tenant in tenants.present(data):
            self._require(tenant, "forward_backward", forward_only=forward_only)
        loss = None if losses is None else LossOfTenants(tenants, losses)
        try:
            result = self._run_passes(handle, PassRequest(data, loss, forward_only, router_replay, tenants))
        except BaseException:
            self._break_trained(tenants, data)
            raise
        if loss is not None:
            loss.failures.update(agree_on_failures(loss.failures, tenants.present(data)))
            for key, failure in loss.failures.items() if tenants.trains else ():
                self._break([mine[key]], f"its loss raised {failure}, so its gradients are incomplete")
        metrics = metrics_by_name(result.metrics, tenants)
        return ForwardResult(result.losses, metrics, result.outputs, results_of_tenants(loss, tenants, data, result))

    def _break_trained(self, tenants: PassTenants, data: Sequence[PackedBatch]) -> None:
        """After an error; one that was raised before anything ran leaves gradients as they were."""
        if tenants.begun and tenants.trains:
            self._break(
                tenants.trained(data), "forward_backward raised an error in the middle, so its gradients are incomplete"
            )

    @staticmethod
    def _break(tenants: Iterable[TenantHandle], reason: str) -> None:
        for tenant in tenants:
            tenant.broken = reason


def _sole(handle: TenantHandle, request: PassRequest) -> PassTenants:
    return PassTenants({handle.lora_id: handle}, trains=not request.forward_only, heads=(handle.head,), sole=handle)
