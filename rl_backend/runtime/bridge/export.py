"""Full weights out of Megatron's shards, under a byte budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo
from rl_backend.runtime.bridge.conversion import Conversion
from rl_backend.runtime.bridge.groups import BridgeGroups
from rl_backend.runtime.export_stream import WeightStream, plan_buckets, require_known_names, start_stream

if TYPE_CHECKING:
    from rl_backend.runtime.bridge.handle import BridgeHandle

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

    Parameters are gathered one by one, as Megatron-Bridge does, in the dtype of the parameters; the ranks agree to go on
    every ``byte_budget`` bytes of them.

    Args:
        dtype: None keeps the dtype of the parameters.
        byte_budget: None agrees at every parameter. What Megatron splits into several tensors counts as a whole. Copies
            while a parameter is put together from its shards come on top.
        only: Hugging Face names; None exports all.

    Raises:
        ConfigError: an unknown name, or a budget smaller than the largest parameter.
    """
    conversions = select_conversions(handle, "export_weights", only)
    buckets = plan_buckets(conversions, byte_budget)
    finish_parameter_gathers(handle)

    def converted(conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in handle.converter.convert(conversion):
            if only is None or name in only:
                yield name, tensor.to(dtype or conversion.dtype)

    return start_conversions(buckets, converted, handle.groups)


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
    require_known_names(operation, only, {name for conversion in conversions for name in conversion.shapes})
    return [conversion for conversion in conversions if not conversion.shapes.keys().isdisjoint(only)]


def start_conversions(buckets: Sequence[Sequence[Conversion]], converted: Converted, groups: BridgeGroups) -> WeightStream:
    """The stream over ``converted`` of every conversion; see :func:`~rl_backend.runtime.export_stream.start_stream`."""

    def gather(bucket: Sequence[Conversion]) -> Iterator[tuple[str, Tensor]]:
        return (item for conversion in bucket for item in converted(conversion))

    return start_stream(buckets, gather, groups.world_group, groups.device)
