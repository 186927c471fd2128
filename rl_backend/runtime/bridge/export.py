"""Full weights out of Megatron's shards, under a byte budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import ConfigError, ExportInterruptedError, TensorInfo
from rl_backend.runtime.bridge.conversion import Conversion
from rl_backend.runtime.bridge.groups import BridgeGroups

if TYPE_CHECKING:
    from rl_backend.runtime.bridge.handle import BridgeHandle

type WeightStream = Generator[tuple[str, Tensor], None, None]
type Converted = Callable[[Conversion], Iterator[tuple[str, Tensor]]]


def describe_weights(handle: BridgeHandle, dtype: torch.dtype | None) -> tuple[TensorInfo, ...]:
    """What :func:`export_weights` yields. Not a collective."""
    return tuple(
        TensorInfo(
            name=name,
            shape=shape,
            dtype=str(dtype or conversion.dtype).removeprefix("torch."),
            nbytes=math.prod(shape) * (dtype or conversion.dtype).itemsize,
        )
        for conversion in handle.converter.conversions
        for name, shape in conversion.shapes.items()
    )


def export_weights(
    handle: BridgeHandle,
    *,
    dtype: torch.dtype | None,
    byte_budget: int | None,
    only: Collection[str] | None,
) -> WeightStream:
    """Checks the arguments, then returns the generator that gathers.

    Parameters are gathered one by one, as Megatron-Bridge does, in the dtype of the parameters. Every ``byte_budget`` bytes
    of them, and once more at the end, the ranks agree that all of them go on; a rank whose generator is closed takes part
    up to there and says no, and the others raise.

    Args:
        dtype: None keeps the dtype of the parameters.
        byte_budget: None agrees at every parameter. What Megatron splits into several tensors counts as a whole. Copies
            while a parameter is put together from its shards come on top.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest parameter.
    """
    conversions = select_conversions(handle, "export_weights", only)
    buckets = _buckets(conversions, byte_budget)
    finish_parameter_gathers(handle)

    def converted(conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in handle.converter.convert(conversion):
            if only is None or name in only:
                yield name, tensor.to(dtype or conversion.dtype)

    return start_stream(buckets, converted, handle.groups)


def finish_parameter_gathers(handle: BridgeHandle) -> None:
    """With ``overlap_param_gather`` Megatron leaves it to the next forward pass to gather what the optimizer has written."""
    for chunk in handle.chunks:
        if handle.optimizer is not None and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def select_conversions(handle: BridgeHandle, operation: str, only: Collection[str] | None) -> list[Conversion]:
    """Those that give a tensor of ``only``; raises :class:`ConfigError` for a name that the model does not have."""
    conversions = handle.converter.conversions
    if only is None:
        return list(conversions)
    unknown = sorted(set(only).difference(*(conversion.shapes for conversion in conversions)))
    if unknown:
        raise ConfigError(
            f"{operation}: the model has no weights called {', '.join(unknown[:8])}; weight_infos lists its names",
            names=unknown,
        )
    return [conversion for conversion in conversions if not conversion.shapes.keys().isdisjoint(only)]


def start_stream(buckets: Sequence[Sequence[Conversion]], converted: Converted, groups: BridgeGroups) -> WeightStream:
    """The generator over ``converted`` of every conversion, at its first agreement.

    It has run to its first yield, so that closing it unused still tells the other ranks.
    """
    stream = _stream(buckets, converted, groups)
    next(stream)
    return stream


def _buckets(conversions: Sequence[Conversion], byte_budget: int | None) -> list[list[Conversion]]:
    if byte_budget is None:
        return [[conversion] for conversion in conversions]
    largest = max(conversions, key=lambda conversion: conversion.nbytes, default=None)
    if largest is not None and largest.nbytes > byte_budget:
        raise ConfigError(
            f"export_weights: byte_budget={byte_budget} cannot hold {largest} with {largest.nbytes} bytes; raise the budget",
            byte_budget=byte_budget,
            name=next(iter(largest.shapes)),
            nbytes=largest.nbytes,
        )
    buckets: list[list[Conversion]] = []
    filled = 0
    for conversion in conversions:
        if not buckets or filled + conversion.nbytes > byte_budget:
            buckets.append([])
            filled = 0
        buckets[-1].append(conversion)
        filled += conversion.nbytes
    return buckets


def _stream(buckets: Sequence[Sequence[Conversion]], converted: Converted, groups: BridgeGroups) -> WeightStream:
    left: Iterator[tuple[str, Tensor]] = iter(())
    try:
        yield "", torch.empty(0)
        for bucket in buckets:
            _raise_if_interrupted(groups)
            left = (item for conversion in bucket for item in converted(conversion))
            # Not `yield from`, which would close what is left together with this generator.
            for item in left:  # noqa: UP028
                yield item
    except GeneratorExit:
        for _ in left:
            # The other ranks gather the rest of this bucket before they ask.
            pass
        _all_go_on(groups, False)
        raise
    _raise_if_interrupted(groups)


def _raise_if_interrupted(groups: BridgeGroups) -> None:
    if not _all_go_on(groups, True):
        raise ExportInterruptedError("another rank closed export_weights before its end, so it ended on this rank too")


def _all_go_on(groups: BridgeGroups, here: bool) -> bool:
    if groups.world_size == 1:
        return here
    flag = torch.tensor(int(here), device=groups.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=groups.all_ranks)
    return bool(flag.item())
