"""LoRA tenants of a frozen model: handles with weights, an optimizer, a schedule and a version of their own."""

import logging
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.checkpoint.hf_weights import LM_HEAD
from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    AdamParams,
    ConfigError,
    Head,
    IndexedLayers,
    OptimizerConfig,
    RoutedLayers,
    StepResult,
    TensorInfo,
    UnsupportedError,
)
from rl_backend.contracts.atoms import Part
from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAInfo, LoRAKind
from rl_backend.lora.modules import AdaptedModule
from rl_backend.lora.rows import RowTensor, Section, TenantRows, factors_of_rank, head_parameters, initial_factor
from rl_backend.parallel.collectives import all_gather
from rl_backend.runtime.adaptable import Adaptable, RowGroups
from rl_backend.runtime.handle import GuardedHandle, require_head
from rl_backend.runtime.interface import RouterReplay
from rl_backend.runtime.optimizer import ParameterSchedule, clip_factor, rank_statistics, step_result


class TenantOptimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over one tenant's row."""

    def __init__(self, config: OptimizerConfig, rows: TenantRows, groups: RowGroups) -> None:
        self.config = config
        self.schedule = ParameterSchedule(config)
        self.has_gradients = False
        self._rows = rows
        self.groups = groups
        self._reduced = False

    @property
    def num_steps(self) -> int:
        return int(self._rows.num_steps)

    @property
    def learning_rate(self) -> float:
        return self.schedule.learning_rate

    def schedule_step(self) -> float:
        return self.schedule.step()

    def expect_gradients(self) -> None:
        # What has been reduced already must not be added up over the ranks again.
        if self._reduced:
            for section, gradients in self._sections():
                gradients.mul_(self.groups.dp_size if self._counts(section) else 0)
            self._reduced = False
        self.has_gradients = True

    def drop_gradients(self) -> None:
        self._rows.gradients.zero_()
        self.has_gradients = self._reduced = False

    def reset(self) -> None:
        """Moments and steps as they were before the first."""
        for each in (self._rows.exp_avg, self._rows.exp_avg_sq, self._rows.num_steps):
            each.zero_()

    def reduce(self) -> None:
        """Makes this rank's gradients those of all ranks, once. A collective."""
        if self._reduced:
            return
        for section, gradients in self._sections():
            tensor, data = self.groups.summing(of_experts=section.of_experts)
            if section.summed and tensor is not None and tensor.size() > 1:
                dist.all_reduce(gradients, group=tensor)
            if data.size() > 1:
                dist.all_reduce(gradients, group=data)
        if self.groups.dp_size > 1:
            self._rows.gradients.div_(self.groups.dp_size)
        self._reduced = True

    def _sections(self) -> Iterator[tuple[Section, Tensor]]:
        for section in self._rows.sections:
            yield section, self._rows.gradients[section.start : section.stop]

    def _counts(self, section: Section) -> bool:
        return self.groups.counts(of_experts=section.of_experts, summed=section.summed)

    def statistics(self) -> Tensor:
        """(1, 2), as :func:`rank_statistics`, of the numbers that this rank counts among those that have them."""
        rows, groups = self._rows, self.groups
        # Zeros of the padding are no gradients.
        if self.config.log_num_zeros_in_grad:
            views = [
                view
                for tensor, view in rows.views(rows.gradients)
                if groups.counts(of_experts=tensor.module.is_expert, summed=tensor.summed)
            ]
            return rank_statistics(views, rows.gradients.device, count_zeros=True)
        counted = [gradients for section, gradients in self._sections() if self._counts(section)]
        return rank_statistics(counted, rows.gradients.device, count_zeros=False)

    def apply(self, result: StepResult, adam: AdamParams) -> None:
        """Clips and steps with the values of this step, or leaves everything as it is."""
        if not result.ok:
            return
        rows, given = self._rows, adam.given
        clip_grad = given.get("clip_grad", self.config.clip_grad)
        if (factor := clip_factor(clip_grad, result.grad_norm)) < 1:
            rows.gradients.mul_(factor)
        beta1, beta2 = given.get("betas", self.config.betas)
        weight_decay = given.get("weight_decay", self.schedule.weight_decay)
        rows.num_steps += 1
        for span, decays in rows.spans():
            # torch.optim.AdamW steps whole tensors; here weight decay is of some spans of one row.
            torch._fused_adamw_(
                [rows.weights[span]],
                [rows.gradients[span]],
                [rows.exp_avg[span]],
                [rows.exp_avg_sq[span]],
                [],
                [rows.num_steps],
                lr=given.get("lr", self.schedule.learning_rate),
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay if decays else 0.0,
                eps=given.get("eps", self.config.eps),
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )


logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class TenantHandle(GuardedHandle[TenantOptimizer]):
    """A tenant. Its ``base`` has the model, ``forward_only`` and shared with others."""

    model: GuardedHandle[Any]  # the base
    lora: LoRAConfig
    modules: tuple[str, ...]  # Hugging Face names of the modules that it adapts, of the whole model
    rows: TenantRows  # its numbers on this rank

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
        """Those of its base, which an export gives with the adapter added, and its own head in place of the base's.

        Raises:
            UnsupportedError: an adapter of one side alone of embeddings that are also the head.
        """
        kept = [info for info in self.model.weights if info.name != LM_HEAD]
        ends = [name for name, kind in self.kinds.items() if kind in ("embedding", "head")]
        if self.head == "log_probs" and ends and len(kept) == len(self.model.weights):
            raise UnsupportedError(
                f"{self.name!r} has an adapter of {ends[0]}, and {self.model.name!r} has one weight for embedding and head: "
                "merged weights could not be those of one alone; export, push and save the adapter itself",
                module=ends[0],
            )
        if self.head == self.model.head:
            return self.model.weights
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
        found = {name: tensor.size for name, tensor in self._whole_factors.items()}
        return found | {PEFT_PREFIX + name: shape for name, shape in self.head_shapes.items()}

    def first_factor(self, name: str) -> Tensor | None:
        """The whole factor of peft's ``name`` as it was made; None where there is none."""
        tensor = self._whole_factors.get(name)
        return None if tensor is None else initial_factor(self.lora, tensor)

    @cached_property
    def _whole_factors(self) -> dict[str, RowTensor]:
        adaptable = self.model.adaptable
        assert adaptable is not None, "the base of a tenant"
        sizes = ((name, kind, *adaptable.sizes[name]) for name, kind in self.kinds.items())
        whole = (AdaptedModule(name, kind, a, b, (0, a), (0, b)) for name, kind, a, b in sizes)
        return {tensor.name: tensor for tensor in factors_of_rank(whole, self.lora, self.kinds)}

    @cached_property
    def kinds(self) -> Mapping[str, LoRAKind]:
        assert self.model.adaptable is not None, "the base of a tenant"
        return {name: self.model.adaptable.kinds[name] for name in self.modules}

    def require_schedulable(self, num_micro_batches: int, *, forward_only: bool) -> None:
        self.model.require_schedulable(num_micro_batches, forward_only=forward_only)

    def require_replayable(self, router_replay: RouterReplay) -> None:
        self.model.require_replayable(router_replay)

    @property
    def has_gradients(self) -> bool:
        return self.trainer.has_gradients

    def step(self, adam: AdamParams | None = None) -> StepResult:
        return step_tenants([self], [adam])[0]

    def drop_gradients(self) -> None:
        self.offload.clear("grad")
        self.trainer.drop_gradients()

    def release(self) -> None:
        super().release()
        empty = self.rows.weights.new_empty(0)
        self.rows = TenantRows(self.lora, (), (), empty, empty, empty, empty, empty)

    def info(self) -> LoRAInfo:
        optimizer = self.trainer
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
    require_head(head)
    if head == "log_probs" and base.head != head:
        raise ConfigError.of("head", head, f"{base.name!r} is a critic; build another base for policies")
    if head == "values" and adaptable.value_head is None:
        raise UnsupportedError(
            f"head={head!r}: this runtime or model family has no place for a head of the tenant's own; use backend='native' "
            "and one of its model families",
            head=head,
        )


def step_tenants(tenants: Sequence[TenantHandle], adam: Sequence[AdamParams | None]) -> list[StepResult]:
    """One step of each, in their order, with its own values; a non-finite gradient skips its own tenant alone."""
    if not tenants:
        return []
    optimizers = [tenant.trainer for tenant in tenants]
    # One by one, so that a tenant's sums have one order whoever is beside it.
    for optimizer in optimizers:
        optimizer.reduce()
    # One exchange for all of them: a collective costs its latency, however small.
    mine = torch.cat([optimizer.statistics() for optimizer in optimizers], dim=1)
    rows = all_gather(mine, tenants[0].groups.world_group, sum_gradients=False)
    results = []
    for index, (tenant, optimizer) in enumerate(zip(tenants, optimizers, strict=True)):
        result = step_result(rows[:, 2 * index : 2 * index + 2], count_zeros=optimizer.config.log_num_zeros_in_grad)
        if not result.ok:
            logger.warning("optimizer step of %r skipped: the gradient norm is %s", tenant.name, result.grad_norm)
        optimizer.apply(result, adam[index] or AdamParams())
        results.append(result)
    return results
