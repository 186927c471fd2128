"""LoRA tenants of a frozen model: handles with weights, an optimizer, a schedule and a version of their own."""

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rl_backend.checkpoint.hf_weights import LM_HEAD
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    AdamParams,
    ConfigError,
    HandleError,
    Head,
    IndexedLayers,
    RoutedLayers,
    StepResult,
    TensorInfo,
    UnsupportedError,
)
from rl_backend.contracts.atoms import Part
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAInfo, LoRAKind
from rl_backend.lora.modules import AdaptedModule
from rl_backend.lora.rows import TenantRows, factors_of, head_parameters
from rl_backend.parallel.collectives import all_gather
from rl_backend.runtime.adaptable import Adaptable
from rl_backend.runtime.engine import GuardedHandle
from rl_backend.runtime.gradient_statistics import judge
from rl_backend.runtime.router_replay import RouterReplay
from rl_backend.runtime.tenants.optimizer import TenantOptimizer

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class TenantHandle(GuardedHandle[TenantOptimizer]):
    """A tenant. Its ``base`` has the model, ``forward_only`` and shared with others.

    Attributes:
        model: the base.
        lora: the configuration.
        modules: Hugging Face names of the modules that it adapts, of the whole model.
        rows: its numbers on this rank.
    """

    model: GuardedHandle[Any]
    lora: LoRAConfig
    modules: tuple[str, ...]
    rows: TenantRows

    @property
    def routed_layers(self) -> RoutedLayers | None:
        return self.model.routed_layers

    @property
    def indexed_layers(self) -> IndexedLayers | None:
        return self.model.indexed_layers

    def roots(self) -> Iterable[nn.Module]:
        return ()

    @contextmanager
    def training(self, enabled: bool) -> Generator[None]:
        before, self.rows.training = self.rows.training, enabled
        try:
            yield
        finally:
            self.rows.training = before

    def part_tensors(self) -> Mapping[Part, Sequence[Tensor]]:
        rows = self.rows
        return {"model": [rows.weights], "optimizer": [rows.exp_avg, rows.exp_avg_sq], "grad": [rows.gradients]}

    @property
    def weights(self) -> tuple[TensorInfo, ...]:
        """Those of its base, which an export gives with the adapter added, and its own head in place of the base's."""
        if self.head == self.model.head:
            return self.model.weights
        kept = [info for info in self.model.weights if info.name != LM_HEAD]
        return (*kept, *(TensorInfo.of(name, shape, torch.float32) for name, shape in self.head_shapes.items()))

    @property
    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the head that it trains whole, by Hugging Face names; empty without one."""
        adaptable = self.model.adaptable
        if self.head == "log_probs" or adaptable is None or adaptable.value_head is None:
            return {}
        sizes = (tensor.size for tensor in head_parameters(adaptable.value_head))
        return dict(zip(VALUE_HEAD_WEIGHTS, sizes, strict=True))

    @cached_property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its own tensors, by peft's names."""
        adaptable = self.model.adaptable
        assert adaptable is not None, "the base of a tenant"
        found = dict[str, tuple[int, ...]]()
        for name, kind in self.kinds.items():
            inputs, outputs = adaptable.sizes[name]
            whole = AdaptedModule(name, kind, inputs, outputs, (0, inputs), (0, outputs))
            found |= {tensor.name: tensor.size for tensor in factors_of(whole, self.lora)}
        return found | {PEFT_PREFIX + name: shape for name, shape in self.head_shapes.items()}

    @cached_property
    def kinds(self) -> Mapping[str, LoRAKind]:
        """What its modules are part of."""
        assert self.model.adaptable is not None, "the base of a tenant"
        return {name: self.model.adaptable.kinds[name] for name in self.modules}

    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        self.model.require_schedulable(num_micro_batches, forward_only=forward_only)

    def require_replayable(self, router_replay: RouterReplay) -> None:
        self.model.require_replayable(router_replay)

    def step(self, adam: AdamParams | None = None) -> StepResult:
        return step_tenants([self], [adam])[0]

    def drop_gradients(self) -> None:
        self.offload.clear("grad")
        self.trainer("zero_grad").drop_gradients()

    def release(self) -> None:
        super().release()
        empty = self.rows.weights.new_empty(0)
        self.rows = TenantRows(self.lora, (), (), empty, empty, empty, empty, empty)

    def info(self) -> LoRAInfo:
        """Facts about it as this rank sees them."""
        optimizer = self.trainer("list_lora_adapters")
        return LoRAInfo(
            name=self.name,
            config=self.lora,
            head=self.head,
            modules=self.modules,
            step=optimizer.num_steps,
            weight_version=self.weight_version,
            learning_rate=optimizer.learning_rate,
            num_parameters=sum(math.prod(tensor.held) for tensor in self.rows.tensors),
            bytes=self.rows.nbytes,
            shapes=self.saved_shapes,
            hf_path=str(self.config.hf_path),
        )


def require_tenant(base: GuardedHandle, adaptable: Adaptable, head: Head) -> None:
    """Raises for a base that cannot have tenants, or none with this head."""
    if adaptable.refused_by:
        raise UnsupportedError(
            f"create_lora_adapter on {base.name!r} with {adaptable.refused_by}; leave it out",
            setting=adaptable.refused_by.partition(": ")[0],
        )
    if head not in get_args(Head.__value__):
        raise ConfigError.of("head", head, f"expected one of {', '.join(map(repr, get_args(Head.__value__)))}")
    if head == "log_probs" and base.head != head:
        raise ConfigError.of("head", head, f"{base.name!r} is a critic; build another base for policies")
    if head == "values" and adaptable.value_head is None:
        raise UnsupportedError(
            f"head={head!r}: this runtime or model family has no place for a head of the tenant's own; use backend='native' "
            "and one of its model families",
            head=head,
        )


def step_tenants(tenants: Sequence[TenantHandle], adam: Sequence[AdamParams | None]) -> list[StepResult]:
    """One step of each, in their order, with its own values and one exchange of norms.

    A non-finite gradient skips its own tenant alone.

    Raises:
        HandleError: a tenant without gradients; then nothing has changed.
    """
    optimizers = [tenant.trainer("optimizer_step") for tenant in tenants]
    for tenant, optimizer in zip(tenants, optimizers, strict=True):
        if not optimizer.has_gradients:
            raise HandleError(
                f"optimizer_step on {tenant.name!r} without gradients; call forward_backward first", handle=tenant.name
            )
    for optimizer in optimizers:
        optimizer.reduce()
    mine = torch.cat([optimizer.statistics() for optimizer in optimizers], dim=1)
    rows = all_gather(mine, tenants[0].groups.world_group, sum_gradients=False)
    results = []
    for index, (tenant, optimizer) in enumerate(zip(tenants, optimizers, strict=True)):
        result = judge(rows[:, 2 * index : 2 * index + 2], count_zeros=optimizer.config.log_num_zeros_in_grad)
        if not result.ok:
            logger.warning("optimizer step of %r skipped: the gradient norm is %s", tenant.name, result.grad_norm)
        optimizer.apply(result, adam[index] or AdamParams())
        results.append(result)
    return results
