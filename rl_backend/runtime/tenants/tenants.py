"""LoRA tenants of a runtime: made, listed, run together, stepped and removed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    OptimizerConfig,
    PackedBatch,
    StepResult,
)
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, part_name
from rl_backend.lora.modules import modules_of_rank, require_trainable, select_modules
from rl_backend.lora.rows import RowTensor, TenantRows, factors_of, head_parameters
from rl_backend.runtime.adaptable import RowGroups
from rl_backend.runtime.engine import Engine, GuardedHandle
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.router_replay import RouterReplay
from rl_backend.runtime.tenants.handle import TenantHandle, require_tenant, step_tenants
from rl_backend.runtime.tenants.optimizer import TenantOptimizer
from rl_backend.runtime.tenants.passes import (
    LossOfTenants,
    PassTenants,
    agree_on_failures,
    metrics_by_name,
    results_of_tenants,
)

type StoredWeights = Callable[[Sequence[str]], Iterable[tuple[str, Tensor]]]
"""Names -> whole float32 weights of the base. A collective."""


class Tenants[H: GuardedHandle]:
    """Those of all models of one runtime; iterating gives them in the order of making.

    Args:
        engine: of the runtime; runs the passes.
    """

    def __init__(self, engine: Engine[H]) -> None:
        self._engine = engine
        self._by_id: dict[int, TenantHandle] = {}
        self._num_made = 0

    def __iter__(self) -> Iterator[TenantHandle]:
        return iter(self._by_id.values())

    def of(self, model: GuardedHandle) -> list[TenantHandle]:
        return [tenant for tenant in self if tenant.model is model]

    def create(
        self,
        base: H,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None,
        *,
        name: str,
        head: Head | None,
        stored: StoredWeights,
    ) -> TenantHandle:
        """As :meth:`~rl_backend.runtime.Runtime.create_lora_adapter`.

        Args:
            stored: reads the base.
        """
        adaptable = base.adaptable
        if adaptable is None:
            raise HandleError(
                f"create_lora_adapter on {base.name!r}, which is trained itself or has no layers to adapt; build it with "
                "build_model(trainable=False)",
                handle=base.name,
            )
        name = name or f"tenant-{self._num_made}"
        if any(tenant.name == name for tenant in self.of(base)):
            raise ConfigError.of("name", name, f"{base.name!r} has a tenant of this name; choose another one")
        head = head or base.head
        require_tenant(base, adaptable, head)
        modules = select_modules(lora, adaptable.kinds)
        require_trainable(lora, modules, adaptable.kinds)
        tensors = [each for module in modules_of_rank(modules, adaptable.held) for each in factors_of(module, lora)]
        own_head = head_parameters(adaptable.value_head) if head == "values" and adaptable.value_head is not None else ()
        tensors += own_head if adaptable.holds_head else ()
        groups = RowGroups.of(adaptable, base.groups.dp_size)
        initial = _initial_head(base, own_head, stored) | _initial_magnitudes(lora, modules, stored)
        # A rank without memory for it must not leave the others with one tenant more, whose numbers would be others.
        with on_every_rank(base.groups.host_group, f"the adapter {name!r} could not be made", HandleError):
            rows = TenantRows.new(lora, tensors, base.groups.device, initial, groups.sum_over_inputs)
        optimizer = optimizer or base.config.backend_cfg.optimizer
        tenant = TenantHandle(
            name=name,
            forward_only=False,
            head=head,
            micro_batch_multiple=base.micro_batch_multiple,
            base=base,
            lora_id=self._num_made,
            owner=base.owner,
            config=base.config,
            hf_config=base.hf_config,
            kept=base.kept,
            vocab_size=base.vocab_size,
            max_length=base.max_length,
            optimizer=TenantOptimizer(optimizer, rows, groups),
            groups=base.groups,
            model=base,
            lora=lora,
            modules=modules,
            rows=rows,
        )
        self._num_made += 1
        self._by_id[tenant.lora_id] = tenant
        return tenant

    def remove(self, tenant: TenantHandle) -> None:
        del self._by_id[tenant.lora_id]
        tenant.release()

    def step(self, tenants: Sequence[TenantHandle]) -> list[StepResult]:
        """One step of each; all are checked before any."""
        if len(set(tenants)) < len(tenants):
            twice = next(each.name for each in tenants if tenants.count(each) > 1)
            raise HandleError(f"optimizer_step of {twice!r} twice in one list; give each tenant once", handle=twice)
        results = step_tenants(tenants)
        for tenant, result in zip(tenants, results, strict=True):
            tenant.weight_version += result.ok
        return results

    def run_alone(self, tenant: TenantHandle, request: PassRequest) -> ForwardResult:
        """A pass whose sequences are all this tenant's."""
        model, own = pass_of_model(tenant, request)
        assert isinstance(own.adapters, PassTenants), "of a tenant"
        try:
            return self._engine.run_passes(model, own)
        except BaseException:
            _break_trained(own.adapters, request.data)
            raise

    def mixed_pass(self, base: H, losses: Losses | None, *, forward_only: bool) -> PassTenants:
        """The tenants of a pass of sequences of several, and of the base alone."""
        if losses is not None and not isinstance(losses, Mapping):
            raise BatchError(f"one loss for the sequences of several tenants of {base.name!r}; pass one for each, by name")
        mine = {tenant.lora_id: tenant for tenant in self.of(base)}
        names = {tenant.name for tenant in mine.values()}
        if losses is not None and (unknown := sorted(losses.keys() - names)):
            raise BatchError(f"loss_fn has {unknown[0]!r}, which is no tenant of {base.name!r}; there are {sorted(names)}")
        heads = sorted({base.head, *(tenant.head for tenant in mine.values())})
        return PassTenants(mine, trains=not forward_only, heads=heads, losses=losses)

    def run_mixed(
        self, base: H, tenants: PassTenants, data: Sequence[PackedBatch], router_replay: RouterReplay
    ) -> ForwardResult:
        """A pass of sequences of several tenants.

        Args:
            tenants: of :meth:`mixed_pass`; those that are present can be used.
        """
        loss = None if tenants.losses is None else LossOfTenants(tenants)
        try:
            request = PassRequest(data, loss, not tenants.trains, router_replay, tenants)
            result = self._engine.run_passes(base, request)
        except BaseException:
            _break_trained(tenants, data)
            raise
        if loss is not None:
            loss.failures.update(agree_on_failures(loss.failures, tenants.present(data)))
            for key, failure in loss.failures.items() if tenants.trains else ():
                tenants.by_id[key].broken = f"its loss raised {failure}, so its gradients are incomplete"
        metrics = metrics_by_name(result.metrics, tenants)
        return ForwardResult(result.losses, metrics, result.outputs, results_of_tenants(loss, tenants, data, result))


def pass_of_model(handle: Any, request: PassRequest) -> tuple[Any, PassRequest]:
    """The model of a handle, and a pass of it whose sequences are all the handle's."""
    if not isinstance(handle, TenantHandle):
        return handle, request
    sole = PassTenants({handle.lora_id: handle}, trains=not request.forward_only, heads=(handle.head,), sole=handle)
    return handle.model, request._replace(adapters=sole)


def _initial_head(base: GuardedHandle, parameters: Sequence[RowTensor], stored: StoredWeights) -> dict[str, Tensor]:
    """As a critic starts: with the head of the base, or with zeros beside a language-model head. A collective."""
    if base.head == "values" and parameters:
        return {PEFT_PREFIX + name: tensor.clone() for name, tensor in stored(VALUE_HEAD_WEIGHTS)}
    return {each.name: torch.zeros(each.size) for each in parameters}


def _initial_magnitudes(lora: LoRAConfig, modules: Sequence[str], stored: StoredWeights) -> dict[str, Tensor]:
    """Those of the base's weights, with which DoRA leaves them as they are. A collective."""
    if not lora.use_dora:
        return {}
    found = stored([f"{module}.weight" for module in modules])
    norms = ((name.removesuffix(".weight"), torch.linalg.vector_norm(tensor, dim=1)) for name, tensor in found)
    return {part_name(module, "attention", "magnitude"): norm for module, norm in norms}


def _break_trained(tenants: PassTenants, data: Sequence[PackedBatch]) -> None:
    """After an error; one that was raised before anything ran leaves gradients as they were."""
    if tenants.begun and tenants.trains:
        for tenant in tenants.trained(data):
            tenant.mark_incomplete()
