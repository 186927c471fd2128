"""Full weights and gradients out of shards, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import HandleError, TensorInfo, WeightName, stored_names, stored_tensors
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, require_known_names, start_stream
from rl_backend.runtime.native.gather import ShardedWeight, gather_weights, sharded_weights


def describe_weights(
    parameters: Mapping[str, Tensor], names: Mapping[str, WeightName], dtype: torch.dtype | None
) -> tuple[TensorInfo, ...]:
    """What :func:`export_weights` yields. Not a collective."""
    infos = []
    for key, name in names.items():
        exported = dtype or parameters[key].dtype
        for index, stored in stored_tensors(name):
            shape = tuple(parameters[key].shape[len(index) :])
            nbytes = math.prod(shape) * exported.itemsize
            infos.append(TensorInfo(name=stored, shape=shape, dtype=str(exported).removeprefix("torch."), nbytes=nbytes))
    return tuple(infos)


def export_weights(
    parameters: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    groups: ParallelGroups,
    *,
    dtype: torch.dtype | None,
    byte_budget: int | None,
    only: Collection[str] | None,
) -> WeightStream:
    """Checks the arguments, then returns the generator that gathers, as
    :func:`~rl_backend.runtime.native.gather.gather_weights` does, one bucket after the other.

    Args:
        byte_budget: bytes of full tensors in one bucket; None gathers one tensor at a time. On top come padding (at most an
            eighth, or 64 KiB) and the tensor that is being put together.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest tensor.
        UnsupportedError: a parameter that is not laid out over all ranks.
    """
    require_known_names("export_weights", only, stored_names(names))
    return _start(sharded_weights(parameters, names, groups.world_group, dtype=dtype, only=only), groups, byte_budget)


def export_gradients(
    parameters: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    groups: ParallelGroups,
    *,
    only: Collection[str] | None,
) -> WeightStream:
    """As :func:`export_weights` for the gradients, in float32; parameters that have none on any rank are left out.

    Raises:
        ConfigError: an unknown name.
        HandleError: there are no gradients.
    """
    require_known_names("export_gradients", only, stored_names(names))
    present = torch.tensor([parameters[key].grad is not None for key in names], dtype=torch.int32, device=groups.device)
    if groups.world_size > 1:
        dist.all_reduce(present, dist.ReduceOp.MAX, group=groups.world_group)
    reached = [key for key, there in zip(names, present.tolist(), strict=True) if there]
    if not reached:
        raise HandleError("export_gradients without gradients; call forward_backward first")
    gradients: dict[str, Tensor] = {}
    for key in reached:
        gradient = parameters[key].grad
        gradients[key] = torch.zeros_like(parameters[key], requires_grad=False) if gradient is None else gradient
    reached_names = {key: names[key] for key in reached}
    weights = sharded_weights(gradients, reached_names, groups.world_group, dtype=torch.float32, only=only)
    return _start(weights, groups, None)


def _start(weights: Sequence[ShardedWeight], groups: ParallelGroups, byte_budget: int | None) -> WeightStream:
    def gather(bucket: Sequence[ShardedWeight]) -> Iterator[tuple[str, Tensor]]:
        return gather_weights(bucket, groups.world_group, groups.device)

    return start_stream(plan_buckets(weights, byte_budget), gather, groups.world_group, groups.device)
