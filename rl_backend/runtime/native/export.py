"""Full weights and gradients out of shards, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import HandleError, TensorInfo, WeightShard, stored_names, stored_tensors
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, require_known_names, start_stream
from rl_backend.runtime.native.gather import ShardedWeight, gather_weights, sharded_weights
from rl_backend.runtime.native.handle import NativeHandle


def describe_weights(handle: NativeHandle, dtype: torch.dtype | None) -> tuple[TensorInfo, ...]:
    """What :func:`export_weights` yields. Not a collective."""
    infos = []
    for key, name in handle.weight_names.items():
        layout = handle.layouts[key]
        exported = dtype or layout.dtype
        for index, stored in stored_tensors(name):
            shape = layout.shards.shape[len(index) :]
            nbytes = math.prod(shape) * exported.itemsize
            infos.append(TensorInfo(name=stored, shape=shape, dtype=str(exported).removeprefix("torch."), nbytes=nbytes))
    return tuple(infos)


def export_weights(
    handle: NativeHandle, *, dtype: torch.dtype | None, byte_budget: int | None, only: Collection[str] | None
) -> WeightStream:
    """Checks the arguments, then returns the generator that gathers, as
    :func:`~rl_backend.runtime.native.gather.gather_weights` does, one bucket after the other.

    Args:
        byte_budget: bytes of full tensors in one bucket; None gathers one tensor at a time. On top come padding (at most an
            eighth, or 64 KiB) and the tensor that is being put together.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest tensor.
    """
    require_known_names("export_weights", only, stored_names(handle.weight_names))
    weights = sharded_weights(handle.parameters, handle.weight_names, handle.layouts, dtype=dtype, only=only)
    return _start(weights, handle, byte_budget)


def export_shards(handle: NativeHandle, dtype: torch.dtype | None) -> Iterator[WeightShard]:
    """This rank's part of every weight, without parts that a lower rank already holds. Not a collective."""
    for weight in sharded_weights(handle.parameters, handle.weight_names, handle.layouts, dtype=dtype, only=None):
        mine = next((part for part in weight.parts if part.rank == dist.get_rank()), None)
        if mine is None:
            nothing = torch.empty(0, dtype=weight.dtype, device=handle.groups.device)
            yield WeightShard(weight.name, weight.shape, (0,) * len(weight.shape), nothing)
        else:
            offset = tuple(part.start for part in mine.region)
            yield WeightShard(weight.name, weight.shape, offset, weight.held().to(weight.dtype))


def export_gradients(handle: NativeHandle, *, only: Collection[str] | None) -> WeightStream:
    """As :func:`export_weights` for the gradients, in float32; parameters that have none on any rank are left out.

    Raises:
        ConfigError: an unknown name.
        HandleError: there are no gradients.
    """
    names, parameters, groups = handle.weight_names, handle.parameters, handle.groups
    require_known_names("export_gradients", only, stored_names(names))
    here = [key in parameters and parameters[key].grad is not None for key in names]
    present = torch.tensor(here, dtype=torch.int32, device=groups.device)
    if groups.world_size > 1:
        dist.all_reduce(present, dist.ReduceOp.MAX, group=groups.world_group)
    reached = {key: name for (key, name), there in zip(names.items(), present.tolist(), strict=True) if there}
    if not reached:
        raise HandleError("export_gradients without gradients; call forward_backward first")
    gradients: dict[str, Tensor] = {}
    for key in reached.keys() & parameters.keys():
        gradient = parameters[key].grad
        gradients[key] = torch.zeros_like(parameters[key], requires_grad=False) if gradient is None else gradient
    return _start(sharded_weights(gradients, reached, handle.layouts, dtype=torch.float32, only=only), handle, None)


def _start(weights: Sequence[ShardedWeight], handle: NativeHandle, byte_budget: int | None) -> WeightStream:
    group, device = handle.groups.world_group, handle.groups.device

    def gather(bucket: Sequence[ShardedWeight]) -> Iterator[tuple[str, Tensor]]:
        return gather_weights(bucket, group, device)

    return start_stream(plan_buckets(weights, byte_budget), gather, group, device)
