"""Full weights and gradients out of shards, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rl_backend.contracts import (
    ConfigError,
    ExportInterruptedError,
    HandleError,
    TensorInfo,
    UnsupportedError,
    WeightName,
    stored_names,
    stored_tensors,
)
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.runtime.native.fsdp_state import local_tensor

type WeightStream = Generator[tuple[str, Tensor], None, None]


@dataclass(frozen=True)
class _Weight:
    """A parameter or its gradient, or one of the tensors that are packed in it.

    Attributes:
        tensor: the whole parameter.
        index: place of the weight in the first dimensions of ``tensor``; empty for all of it.
    """

    name: str
    tensor: Tensor
    dtype: torch.dtype
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[len(self.index) :])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def describe_weights(
    parameters: Mapping[str, Tensor], names: Mapping[str, WeightName], dtype: torch.dtype | None
) -> tuple[TensorInfo, ...]:
    """What :func:`export_weights` yields."""
    return tuple(
        TensorInfo(
            name=weight.name,
            shape=weight.shape,
            dtype=str(weight.dtype).removeprefix("torch."),
            nbytes=weight.nbytes,
        )
        for weight in _select(parameters, names, dtype, None)
    )


def export_weights(
    parameters: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    groups: ParallelGroups,
    *,
    dtype: torch.dtype | None,
    byte_budget: int | None,
    only: Collection[str] | None,
) -> WeightStream:
    """Checks the arguments, then returns the generator that gathers.

    Every bucket is one all-gather and, for tensors that are packed in a larger parameter and so lie on one rank each, one
    broadcast from each of these ranks. Before each bucket, and once more at the end, the ranks agree that all of them go on;
    a rank whose generator is closed says no there, and the others raise.

    Args:
        byte_budget: bytes of full tensors in one bucket; None gathers one tensor at a time. Padding to equal shards (less
            than one row per tensor and rank) comes on top.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest tensor.
        UnsupportedError: a parameter that is sharded in another way than FSDP2 does by default.
    """
    _check_names("export_weights", names, only)
    return _open_stream(_select(parameters, names, dtype, only), groups, byte_budget)


def _open_stream(weights: Sequence[_Weight], groups: ParallelGroups, byte_budget: int | None) -> WeightStream:
    buckets = _buckets(weights, byte_budget)
    for weight in weights:
        _check_placement(weight)
    stream = _gather_buckets(buckets, groups)
    # The generator runs to its first yield here, so that closing it unused still tells the other ranks.
    next(stream)
    return stream


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
    _check_names("export_gradients", names, only)
    present = torch.tensor([parameters[key].grad is not None for key in names], dtype=torch.int32, device=groups.device)
    if groups.dp_size > 1:
        dist.all_reduce(present, dist.ReduceOp.MAX, group=groups.dp_group)
    reached = [key for key, there in zip(names, present.tolist(), strict=True) if there]
    if not reached:
        raise HandleError("export_gradients without gradients; call forward_backward first")
    gradients: dict[str, Tensor] = {}
    for key in reached:
        gradient = parameters[key].grad
        gradients[key] = torch.zeros_like(parameters[key], requires_grad=False) if gradient is None else gradient
    return _open_stream(_select(gradients, {key: names[key] for key in reached}, torch.float32, only), groups, None)


def _check_names(operation: str, names: Mapping[str, WeightName], only: Collection[str] | None) -> None:
    unknown = sorted(set(only or ()) - set(stored_names(names)))
    if unknown:
        raise ConfigError(
            f"{operation}: the model has no weights called {', '.join(unknown[:8])}; weight_infos lists its names",
            names=unknown,
        )


def _select(
    parameters: Mapping[str, Tensor],
    names: Mapping[str, WeightName],
    dtype: torch.dtype | None,
    only: Collection[str] | None,
) -> list[_Weight]:
    return [
        _Weight(stored, parameters[key], dtype or parameters[key].dtype, index)
        for key, name in names.items()
        for index, stored in stored_tensors(name)
        if only is None or stored in only
    ]


def _buckets(weights: Sequence[_Weight], byte_budget: int | None) -> list[list[_Weight]]:
    if byte_budget is None:
        return [[weight] for weight in weights]
    largest = max(weights, key=lambda weight: weight.nbytes, default=None)
    if largest is not None and largest.nbytes > byte_budget:
        raise ConfigError(
            f"export_weights: byte_budget={byte_budget} cannot hold {largest.name} with its {largest.nbytes} bytes; "
            "raise the budget",
            byte_budget=byte_budget,
            name=largest.name,
            nbytes=largest.nbytes,
        )
    buckets: list[list[_Weight]] = []
    filled = 0
    for weight in weights:
        same_dtype = bool(buckets) and buckets[-1][-1].dtype == weight.dtype
        if not same_dtype or filled + weight.nbytes > byte_budget:
            buckets.append([])
            filled = 0
        buckets[-1].append(weight)
        filled += weight.nbytes
    return buckets


def _check_placement(weight: _Weight) -> None:
    tensor = weight.tensor
    if isinstance(tensor, DTensor) and tuple(tensor.placements) != (Shard(0),):
        raise UnsupportedError(
            f"export_weights: {weight.name} has placements {tuple(tensor.placements)}; the native runtime exports "
            "parameters that are sharded over their first dimension",
            name=weight.name,
        )


def _gather_buckets(buckets: Sequence[Sequence[_Weight]], groups: ParallelGroups) -> WeightStream:
    try:
        yield "", torch.empty(0)
        for bucket in buckets:
            _raise_if_interrupted(groups)
            yield from _gather(bucket, groups)
    except GeneratorExit:
        _all_go_on(groups, False)
        raise
    _raise_if_interrupted(groups)


def _raise_if_interrupted(groups: ParallelGroups) -> None:
    if not _all_go_on(groups, True):
        raise ExportInterruptedError("another rank closed export_weights before its end, so it ended on this rank too")


def _all_go_on(groups: ParallelGroups, here: bool) -> bool:
    if groups.dp_size == 1:
        return here
    flag = torch.tensor(int(here), device=groups.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=groups.dp_group)
    return bool(flag.item())


def _gather(bucket: Sequence[_Weight], groups: ParallelGroups) -> WeightStream:
    if groups.dp_size == 1:
        for weight in bucket:
            yield weight.name, local_tensor(weight.tensor)[weight.index].to(weight.dtype)
        return
    # All collectives of a bucket come before its first tensor, after which a rank may close the stream.
    whole = iter(_gather_shards([weight for weight in bucket if not weight.index], groups))
    packed = iter(_broadcast_packed([weight for weight in bucket if weight.index], groups))
    for weight in bucket:
        if weight.index:
            yield weight.name, next(packed)
        else:
            yield weight.name, next(whole).reshape(-1)[: weight.numel].view(weight.shape)


def _gather_shards(weights: Sequence[_Weight], groups: ParallelGroups) -> list[Tensor]:
    """Parameters that every rank has a part of: (ranks, elements of a padded shard) each, views of one buffer."""
    if not weights:
        return []
    ranks = groups.dp_size
    rows = [_rows_of_a_rank(weight, groups) for weight in weights]
    sizes = [count * math.prod(weight.shape[1:]) for count, weight in zip(rows, weights, strict=True)]
    mine = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=groups.device)
    for weight, part in zip(weights, mine.split(sizes), strict=True):
        shard = local_tensor(weight.tensor).flatten()
        part[: shard.numel()].copy_(shard)
    gathered = torch.empty(ranks * mine.numel(), dtype=mine.dtype, device=groups.device)
    dist.all_gather_into_tensor(gathered, mine, group=groups.dp_group)
    return list(gathered.view(ranks, -1).split(sizes, dim=1))


def _broadcast_packed(weights: Sequence[_Weight], groups: ParallelGroups) -> list[Tensor]:
    """Tensors that one rank has, because the first dimension of the parameter numbers them."""
    received: dict[str, Tensor] = {}
    for owner in range(groups.dp_size):
        owned = [weight for weight in weights if weight.index[0] // _rows_of_a_rank(weight, groups) == owner]
        if not owned:
            continue
        flat = torch.empty(sum(weight.numel for weight in owned), dtype=owned[0].dtype, device=groups.device)
        for weight, part in zip(owned, flat.split([weight.numel for weight in owned]), strict=True):
            row, *inner = weight.index
            if owner == groups.dp_rank:
                held = local_tensor(weight.tensor)[row % _rows_of_a_rank(weight, groups), *inner]
                part.copy_(held.flatten())
            received[weight.name] = part.view(weight.shape)
        dist.broadcast(flat, group=groups.dp_group, group_src=owner)
    return [received[weight.name] for weight in weights]


def _rows_of_a_rank(weight: _Weight, groups: ParallelGroups) -> int:
    """FSDP2 splits dimension 0 in chunks of this many rows; the last ranks may have less, or nothing."""
    return math.ceil(weight.tensor.shape[0] / groups.dp_size)
