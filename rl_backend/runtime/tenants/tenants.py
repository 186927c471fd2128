"""LoRA tenants of a runtime: the list of them, and what the engine does for a model done for a tenant."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_backend.checkpoint.manifest import TrainingManifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import StateTensors, on_every_rank
from rl_backend.contracts import (
    TOKENS_COMPUTED,
    VALUE_HEAD_WEIGHTS,
    AdamParams,
    BatchError,
    ConfigError,
    ForwardResult,
    HandleError,
    Head,
    Losses,
    ModelHandle,
    OptimizerConfig,
    PackedBatch,
    TenantStep,
)
from rl_backend.contracts.atoms import Atom, Needs
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, part_name
from rl_backend.lora.modules import modules_of_rank, require_trainable, select_modules
from rl_backend.lora.rows import (
    RowTensor,
    TenantRows,
    WholeTensors,
    factors_of_rank,
    head_parameters,
    merged_weights,
    whole_tensors,
)
from rl_backend.runtime.adaptable import RowGroups
from rl_backend.runtime.engine import Engine
from rl_backend.runtime.export_stream import WeightStream, require_known_names
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.interface import RouterReplay
from rl_backend.runtime.passes import PassRequest
from rl_backend.runtime.tenants.handle import TenantHandle, TenantOptimizer, require_tenant, step_tenants
from rl_backend.runtime.tenants.passes import (
    LossOfTenants,
    PassTenants,
    agree_on_failures,
    metrics_by_name,
    results_of_tenants,
)
from rl_backend.runtime.tenants.state import load_tenant_state, tenant_state

type StoredWeights = Callable[[Sequence[str]], Iterable[tuple[str, Tensor]]]
"""Names -> whole float32 weights of the base. A collective."""


class Tenants:
    """Those of all models of one runtime; iterating gives them in the order of making.

    Of a tenant it answers what an :class:`~rl_backend.runtime.engine.Engine` answers of a model.
    """

    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine
        self._by_id: dict[int, TenantHandle] = {}
        self._num_made = 0

    def __iter__(self) -> Iterator[TenantHandle]:
        return iter(self._by_id.values())

    def __contains__(self, handle: ModelHandle) -> bool:
        return self._by_id.get(handle.lora_id) is handle

    def __getitem__(self, handle: ModelHandle) -> TenantHandle:
        """The tenant of a handle; raises :class:`HandleError` for one of a model."""
        if handle not in self:
            raise HandleError(f"{handle.name!r} is no LoRA tenant; take a handle of create_lora_adapter", handle=handle.name)
        return self._by_id[handle.lora_id]

    def of(self, model: GuardedHandle) -> list[TenantHandle]:
        return [tenant for tenant in self if tenant.model is model]

    def require(self, handle: GuardedHandle, atom: Atom, needs: Needs) -> None:
        """Raises :class:`HandleError` for an atom of models or tenants alone, or a base that is in host memory."""
        if handle not in self and atom.takes != "tenants":
            return
        base = self[handle].model
        if atom.takes == "models":
            raise HandleError(
                f"{atom.name} on {handle.name!r}, a LoRA tenant; give {base.name!r}, or a model of merged weights",
                handle=handle.name,
            )
        base.offload.require(atom.name, *(part for part in needs.parts if part == "model"))

    def create(
        self,
        base: GuardedHandle,
        lora: LoRAConfig,
        optimizer: OptimizerConfig | None,
        *,
        name: str,
        head: Head | None,
        stored: StoredWeights,
    ) -> TenantHandle:
        """As :meth:`~rl_backend.runtime.Runtime.create_lora_adapter`; ``stored`` reads the base."""
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
        tensors = factors_of_rank(modules_of_rank(modules, adaptable.held), lora, adaptable.kinds)
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
            # Never used again, not even after the tenant is removed: data may still name it.
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

    def remove(self, handle: ModelHandle) -> None:
        self._by_id.pop(handle.lora_id).release()

    def step(self, handles: Sequence[GuardedHandle], adam: Sequence[AdamParams | None] | None) -> list[TenantStep]:
        """One step of each that has gradients, with its own values."""
        tenants = [self[each] for each in handles]
        values = [None] * len(tenants) if adam is None else adam
        if not tenants or len(set(tenants)) < len(tenants) or len(values) != len(tenants):
            raise HandleError(
                f"optimizer_step of {[each.name for each in tenants]} with {adam} for adam; give each tenant once, and for "
                "adam the values of each, or None"
            )
        # The same on every rank, whose passes and failures are.
        found = {tenant: TenantStep(False, 0.0, None, _why_not(tenant)) for tenant in tenants}
        able = {tenant: adam for tenant, adam in zip(tenants, values, strict=True) if not found[tenant].error}
        for tenant, result in zip(able, step_tenants(list(able), list(able.values())), strict=True):
            tenant.weight_version += result.ok
            found[tenant] = TenantStep(*result)
        return list(found.values())

    def run_passes(self, handle: ModelHandle, request: PassRequest) -> ForwardResult:
        tenant = self[handle]
        own = _sole(tenant, request)
        request = request._replace(adapters=own)
        try:
            return self._engine.run_passes(tenant.model, request)
        except BaseException:
            _break_trained(own, request.data)
            raise

    def record_activations(self, handle: ModelHandle, request: PassRequest) -> list[Mapping[str, Tensor]]:
        tenant = self[handle]
        return self._engine.record_activations(tenant.model, request._replace(adapters=_sole(tenant, request)))

    def gather_weights(
        self, handle: ModelHandle, dtype: torch.dtype | None, byte_budget: int | None, names: Collection[str] | None
    ) -> WeightStream:
        """Those of the base with the adapter added, and the tenant's own head in place of the base's."""
        tenant = self[handle]
        infos = {info.name: info for info in tenant.weights}
        require_known_names("export_weights", names, infos)
        wanted = infos if names is None else names
        base = None if names is None and tenant.head == tenant.model.head else set(wanted).difference(tenant.head_shapes)
        stream = self._engine.gather_weights(tenant.model, dtype, byte_budget, base)
        own = {name: dtype or getattr(torch, infos[name].dtype) for name in tenant.head_shapes if name in wanted}
        return merged_weights(stream, _tensors_of(tenant, tenant.rows.weights), tenant.kinds, tenant.lora.scale, own)

    def gather_gradients(self, handle: ModelHandle, names: Collection[str] | None) -> WeightStream:
        """Of the tenant's own tensors, by peft's names."""
        tenant = self[handle]
        require_known_names("export_gradients", names, tenant.saved_shapes)
        tenant.require_gradients("export_gradients")
        tenant.trainer.reduce()
        tensors = _tensors_of(tenant, tenant.rows.gradients)
        return ((name, value) for name, value in tensors.items() if names is None or name in names)

    def training_state(self, handle: ModelHandle) -> tuple[StateTensors, TrainingManifest]:
        return tenant_state(self[handle])

    def load_training_state(self, handle: ModelHandle, path: StateSource, *, optimizer: bool = True) -> TrainingManifest:
        return load_tenant_state(self[handle], path, optimizer=optimizer)

    def mixed_pass(self, base: GuardedHandle, losses: Losses | None, *, forward_only: bool) -> PassTenants:
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
        self, base: GuardedHandle, tenants: PassTenants, data: Sequence[PackedBatch], router_replay: RouterReplay
    ) -> ForwardResult:
        """A pass of sequences of several tenants, which :meth:`mixed_pass` gives and which can be used."""
        loss = None if tenants.losses is None else LossOfTenants(tenants)
        try:
            request = PassRequest(data, loss, not tenants.trains, router_replay, tenants)
            result = self._engine.run_passes(base, request)
        except BaseException:
            _break_trained(tenants, data)
            raise
        if loss is not None:
            loss.failures.update(agree_on_failures(loss.failures, tenants.with_loss(data)))
            for key, failure in loss.failures.items() if tenants.trains else ():
                tenants.by_id[key].broken = f"its loss raised {failure}, so its gradients are incomplete"
        # By number until here: names may contain each other.
        of_all = {name: metric for name, metric in result.metrics.items() if name == TOKENS_COMPUTED}
        own = {name: metric for name, metric in result.metrics.items() if name != TOKENS_COMPUTED}
        metrics = {**metrics_by_name(own, tenants), **of_all}
        return ForwardResult(result.losses, metrics, result.outputs, results_of_tenants(loss, tenants, data, result))


def _why_not(tenant: TenantHandle) -> str:
    try:
        tenant.require_gradients("optimizer_step")
    except HandleError as error:
        return error.message
    return ""


def _tensors_of(tenant: TenantHandle, row: Tensor) -> WholeTensors:
    adaptable = tenant.model.adaptable
    assert adaptable is not None, "the base of a tenant"
    return whole_tensors(tenant.rows, row, tenant.saved_shapes, adaptable.whole_group)


def _sole(tenant: TenantHandle, request: PassRequest) -> PassTenants:
    return PassTenants({tenant.lora_id: tenant}, trains=not request.forward_only, heads=(tenant.head,), sole=tenant)


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
    # An error that was raised before anything ran leaves gradients as they were.
    if tenants.begun and tenants.trains:
        for tenant in tenants.trained(data):
            tenant.mark_incomplete()
