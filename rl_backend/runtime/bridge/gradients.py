"""Gradients in Megatron's buffers: whole ones by name, and adding up over several backward passes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from rl_backend.contracts import HandleError
from rl_backend.parallel.collectives import all_gather_into
from rl_backend.runtime.bridge.conversion import Conversion
from rl_backend.runtime.bridge.export import select_conversions, start_conversions
from rl_backend.runtime.export_stream import WeightStream

if TYPE_CHECKING:
    from rl_backend.runtime.bridge.handle import BridgeHandle


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
