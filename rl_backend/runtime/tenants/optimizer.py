"""The optimizer of one LoRA tenant: gradients over ranks, their norm, clipping and steps, in its own row."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import AdamParams, OptimizerConfig, StepResult
from rl_backend.lora.rows import Section, TenantRows
from rl_backend.runtime.adaptable import RowGroups
from rl_backend.runtime.gradient_statistics import rank_statistics
from rl_backend.runtime.lr_schedule import ParameterSchedule

_CLIP_EPSILON = 1.0e-6


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
        """Before a backward pass: what has been reduced already must not be added up over the ranks again."""
        if self._reduced:
            for section, gradients in self._sections():
                gradients.mul_(self.groups.dp_size if self._counts(section) else 0)
            self._reduced = False
        self.has_gradients = True

    def drop_gradients(self) -> None:
        self._rows.gradients.zero_()
        self.has_gradients = self._reduced = False

    def reduce(self) -> None:
        """Makes this rank's gradients those of all ranks, once. A collective; a tenant's by itself, so that its sums have
        one order whoever is beside it.
        """
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
        """The sections of the row, and their gradients."""
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
        if 0 < clip_grad < result.grad_norm + _CLIP_EPSILON:
            rows.gradients.mul_(clip_grad / (result.grad_norm + _CLIP_EPSILON))
        beta1, beta2 = given.get("betas", self.config.betas)
        weight_decay = given.get("weight_decay", self.schedule.weight_decay)
        rows.num_steps += 1
        for span, decays in rows.spans():
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
