"""Full weights and gradients out of Megatron's shards and buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from rl_backend.contracts import HandleError, TensorInfo
from rl_backend.parallel.collectives import all_gather_into
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

    Parameters are gathered one by one, as Megatron-Bridge does, in the dtype of the parameters; the ranks agree to continue
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


def export_gradients(handle: BridgeHandle, *, only: Collection[str] | None) -> WeightStream:
    """Yields (Hugging Face name, full float32 gradient, averaged over dp) in the order of ``export_weights``.

    The reduced shards are gathered into the gradient buffers, whose other parts are of no use after a backward pass, so
    this takes no memory beyond one converted parameter.

    Raises:
        ConfigError: an unknown name.
        HandleError: there are no gradients.
    """
    if not handle.has_gradients:
        raise HandleError("export_gradients without gradients; call forward_backward first", handle=handle.name)
    conversions = [each for each in select_conversions(handle, "export_gradients", only) if each.trained]
    for shard in _shards(handle.chunks):
        if shard.group.size() > 1:
            all_gather_into(shard.whole, shard.part.clone(), group=shard.group)
    gradients = {
        f"{stage}.{name}": parameter.main_grad
        for stage, model in enumerate(unwrap_model(list(handle.chunks)))
        for name, parameter in model.named_parameters()
    }

    def converted(conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in handle.converter.convert(conversion, gradients):
            if only is None or name in only:
                yield name, tensor.float()

    return start_conversions([[conversion] for conversion in conversions], converted, handle.groups)


@contextmanager
def held_gradients(chunks: Sequence[Any], *, has_gradients: bool) -> Generator[None]:
    """Around a backward pass: adds its gradients to those of earlier passes.

    Megatron reduces the whole buffer over the ranks at the end of every pass; what is there already would be reduced once
    more. So the reduced shards are set aside, and added when the pass is over. After an error they are lost.

    Args:
        has_gradients: a backward pass has run since the last ``zero_grad``. Without one this does nothing.
    """
    if not has_gradients:
        yield
        return
    held = [shard.part.clone() for shard in _shards(chunks)]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    yield
    for shard, earlier in zip(_shards(chunks), held, strict=True):
        shard.part.add_(earlier)


class _Shard(NamedTuple):
    """One bucket of Megatron's gradient buffers.

    Attributes:
        whole: the bucket.
        part: what this rank has reduced of it, and its optimizer reads.
        group: the ranks that have one part each.
    """

    whole: Tensor
    part: Tensor
    group: dist.ProcessGroup


def _shards(chunks: Sequence[Any]) -> Iterator[_Shard]:
    for chunk in chunks:
        # Experts are reduced over other ranks than the rest.
        for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                yield _Shard(bucket.grad_data, bucket.grad_data.chunk(group.size())[group.rank()], group)
