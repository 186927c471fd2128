"""Modules that LoRA tenants can adapt, and the ranks over which their gradients are summed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from rl_backend.contracts.lora import LoRAKind
from rl_backend.lora.modules import AdaptedModule
from rl_backend.parallel.collectives import gather_objects, sum_over
from rl_backend.primitive.adapters import HEAD, SumOverRanks

COUPLES = "gradients of a tenant would depend on tokens of the others"
TRAINS_BASE = "it trains a part of the base, which stands still beside tenants"
"""Why a setting is refused beside tenants."""


class SumGroups(NamedTuple):
    """Ranks over which a gradient is added up: those with parts of it (None for this one alone), and those with other
    tokens.
    """

    tensor: dist.ProcessGroup | None
    data: dist.ProcessGroup


@dataclass(frozen=True)
class Adaptable:
    """What LoRA tenants can adapt of a model."""

    kinds: Mapping[str, LoRAKind]  # Hugging Face name of a module of the whole model -> what it is part of
    sizes: Mapping[str, tuple[int, int]]  # name -> (inputs, outputs)
    held: Mapping[str, AdaptedModule]  # those that this rank has a part of
    tensor_group: dist.ProcessGroup  # ranks with parts of one gradient
    data_group: dist.ProcessGroup  # ranks with other tokens
    expert_groups: SumGroups | None  # the same for modules of experts; None where the model has none
    whole_group: dist.ProcessGroup  # ranks that have all of the modules together
    refused_by: str = ""  # the setting that rules tenants out, its value and why; empty where there is none
    value_head: AdaptedModule | None = None  # what a head of a tenant stands on; None where the engine has no place for it
    holds_head: bool = False  # whether this rank computes it

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
        """
        whole = dict(held)
        for group in gathered_over:
            whole = {name: module for part in gather_objects(whole, group) for name, module in part.items()}
        # A tied head has no weight of its own.
        names = dict.fromkeys([*(weight.removesuffix(".weight") for weight in weights), HEAD])
        modules = [whole[name] for name in names if name in whole]
        return cls(
            kinds={module.name: module.kind for module in modules},
            sizes={module.name: (module.in_features, module.out_features) for module in modules},
            held=held,
            **groups,
        )


class RowGroups(NamedTuple):
    """Ranks over which a tenant's gradients are added up, of dense modules and of experts, and averaged over ``dp_size``."""

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
        """Whether this rank counts a tensor, of all that have it: for norms, and in checkpoints."""
        tensor, data = self.summing(of_experts=of_experts)
        return data.rank() == 0 and (not summed or tensor is None or tensor.rank() == 0)

    def sum_over_inputs(self, module: AdaptedModule) -> SumOverRanks | None:
        group = self.summing(of_experts=module.is_expert).tensor
        return sum_over(group) if module.cuts_inputs and group is not None else None
