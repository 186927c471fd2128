"""Modules that LoRA tenants can adapt, and the ranks over which their gradients are summed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from rl_backend.contracts.lora import LoRAKind
from rl_backend.lora.modules import AdaptedModule
from rl_backend.parallel.collectives import sum_over
from rl_backend.primitive.adapters import SumOverRanks

COUPLES = "gradients of a tenant would depend on tokens of the others"
TRAINS_BASE = "it trains a part of the base, which stands still beside tenants"
"""Why a setting is refused beside tenants."""


class SumGroups(NamedTuple):
    """Ranks over which a gradient is added up: those with parts of it (None for this rank alone), and those with other
    tokens.
    """

    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup


@dataclass(frozen=True)
class Adaptable:
    """What LoRA tenants can adapt of a model.

    Attributes:
        kinds: Hugging Face name of a module -> what it is part of, of the whole model.
        sizes: name -> (inputs, outputs), of the same modules.
        held: those that this rank has a part of.
        refused_by: the setting with which there can be no tenants, its value and why; empty where there is none.
        value_head: what a head of a tenant's own stands on; None where the engine has no place for it.
        holds_head: whether this rank computes it.
        tensor_group, data_group: ranks with parts of one gradient, and ranks with other tokens.
        expert_groups: the same for modules of experts; None where the model has none.
        whole_group: ranks that have all of the modules together.
    """

    kinds: Mapping[str, LoRAKind]
    sizes: Mapping[str, tuple[int, int]]
    held: Mapping[str, AdaptedModule]
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    expert_groups: SumGroups | None
    whole_group: dist.ProcessGroup
    refused_by: str = ""
    value_head: AdaptedModule | None = None
    holds_head: bool = False

    @classmethod
    def of_ranks(
        cls,
        held: Mapping[str, AdaptedModule],
        weights: Iterable[str],
        gathered_over: Sequence[dist.ProcessGroup],
        **groups: Any,
    ) -> Self:
        """From what each rank holds. A collective.

        Args:
            weights: Hugging Face names of the model's weights, in order.
            gathered_over: ranks with other modules: those of experts, those of the pipeline.
            groups: the other attributes.
        """
        whole = dict(held)
        for group in gathered_over:
            found: list[Mapping[str, AdaptedModule]] = [whole] * group.size()
            if group.size() > 1:
                dist.all_gather_object(found, whole, group=group)
            whole = {name: module for part in found for name, module in part.items()}
        modules = [whole[name] for name in (weight.removesuffix(".weight") for weight in weights) if name in whole]
        return cls(
            kinds={module.name: module.kind for module in modules},
            sizes={module.name: (module.in_features, module.out_features) for module in modules},
            held=held,
            **groups,
        )


class RowGroups(NamedTuple):
    """Ranks over which a tenant's gradients are added up.

    Attributes:
        dense, experts: of modules that all tokens go through, and of those of experts.
        dp_size: gradients are averaged over so many ranks.
    """

    dense: SumGroups
    experts: SumGroups
    dp_size: int

    @classmethod
    def of(cls, adaptable: Adaptable, dp_size: int) -> Self:
        dense = SumGroups(adaptable.tensor_group, adaptable.data_group)
        return cls(dense, adaptable.expert_groups or dense, dp_size)

    def summing(self, *, of_experts: bool) -> SumGroups:
        return self.experts if of_experts else self.dense

    def counts(self, *, of_experts: bool, summed: bool) -> bool:
        """Whether this rank counts a tensor among the ranks that have it: for norms, and in checkpoints."""
        tensor, data = self.summing(of_experts=of_experts)
        return data.rank() == 0 and (not summed or tensor is None or tensor.rank() == 0)

    def sum_over_inputs(self, module: AdaptedModule) -> SumOverRanks | None:
        """What adds up over the ranks with the other inputs of a module; None where this rank has all."""
        group = self.summing(of_experts=module.is_expert).tensor
        return sum_over(group) if module.cuts_inputs and group is not None else None
