"""Sizes of a model's parameters on one rank: what it holds, and what FSDP gathers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl_backend.contracts import WeightName, stored_tensors
from rl_backend.parallel.shards import local_tensor
from rl_backend.runtime.export_stream import plan_buckets


class ParameterSize(NamedTuple):
    """Elements of one parameter.

    Attributes:
        held: what this rank keeps of it.
        computed: what this rank computes with, of a parameter that tensor or expert parallelism splits: its part.
        whole: shape on all ranks together.
        trained: whether it has a gradient.
    """

    held: int
    computed: int
    whole: tuple[int, ...]
    trained: bool


@dataclass(frozen=True)
class ShardedStage:
    """Parameters of a stage, or of a model without stages, on one rank.

    Attributes:
        parameters: by name.
        units: name -> names of the parameters that FSDP gathers with that module; those of the root under "". Empty where
            nothing is sharded.
    """

    parameters: Mapping[str, ParameterSize]
    units: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, sharded: nn.Module, plain: nn.Module) -> ShardedStage:
        """Args:
        sharded: as the runtime builds it.
        plain: the same without FSDP.
        """
        computed = {name: local_tensor(value).numel() for name, value in plain.named_parameters()}
        parameters = {
            name: ParameterSize(local_tensor(value).numel(), computed[name], tuple(value.shape), value.requires_grad)
            for name, value in sharded.named_parameters()
        }
        modules = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
        units: dict[str, list[str]] = {module: [] for module in modules}
        for name in parameters if units else ():
            units[max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)].append(name)
        return cls(parameters, units)

    @cached_property
    def held(self) -> int:
        return sum(each.held for each in self.parameters.values())

    @cached_property
    def held_and_trained(self) -> int:
        return sum(each.held for each in self.parameters.values() if each.trained)

    def gathered(self, *, all_at_once: bool, trained: bool = False) -> int:
        """Elements of whole parameters that exist at one time.

        Args:
            all_at_once: nothing is freed between forward and backward. Otherwise two layers are there, the one that
                computes and the one that is fetched ahead, and the parameters outside of layers.
            trained: count those that have gradients only.
        """
        sizes = {
            unit: sum(self.parameters[name].computed for name in names if self.parameters[name].trained or not trained)
            for unit, names in self.units.items()
        }
        if all_at_once:
            return sum(sizes.values())
        layers = [unit for unit in sizes if unit and not any(unit.startswith(f"{other}.") for other in sizes if other)]
        whole = [sum(size for unit, size in sizes.items() if f"{unit}.".startswith(f"{layer}.")) for layer in layers]
        return sizes.get("", 0) + 2 * max(whole, default=0)


class SyncedWeight(NamedTuple):
    """A full tensor of a weight sync."""

    name: str
    nbytes: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return self.name


def weights_to_sync(
    names: Mapping[str, WeightName], parameters: Mapping[str, ParameterSize], dtype: torch.dtype
) -> list[SyncedWeight]:
    """What ``export_weights`` yields of a model."""
    return [
        SyncedWeight(stored, math.prod(parameters[key].whole[len(index) :]) * dtype.itemsize, dtype)
        for key, name in names.items()
        for index, stored in stored_tensors(name)
    ]


def sync_bucket_bytes(weights: Sequence[SyncedWeight], byte_budget: int | None, world_size: int) -> int:
    """What ``export_weights`` of the native runtime takes on a rank at one time.

    Beside the full tensors of a bucket: padding of at most an eighth, what the rank sends, and the tensor that is put
    together. A single rank only changes the dtype.

    Raises:
        ConfigError: a budget smaller than the largest tensor.
    """
    buckets = plan_buckets(weights, byte_budget)
    largest = max(weight.nbytes for weight in weights)
    if world_size == 1:
        return largest
    bucket = max(sum(weight.nbytes for weight in each) for each in buckets)
    return bucket + bucket // 8 + bucket // world_size + largest
