"""Buffers of Megatron's DDP: gradients of several passes, and the gathers and reductions that it postpones."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from rl_backend.parallel.collectives import all_gather_into


def overlaps_gathers(chunk: Any) -> bool:
    """Whether forward passes gather what the optimizer wrote, each bucket when a module needs it."""
    return bool(chunk.ddp_config.overlap_param_gather)


def wait_for_gathers(chunks: Sequence[Any]) -> None:
    # Before the optimizer writes what they read: a forward pass that failed may have begun one that no module awaits.
    for chunk in filter(overlaps_gathers, chunks):
        chunk.free_overlap_buffers()


def gather_again(chunks: Sequence[Any]) -> None:
    """After the optimizer wrote: makes the next forward pass gather."""
    # The end of a backward pass marks buckets as not gathered, and whatever gathers between it and the step as gathered:
    # forward-only passes, exports, checkpoints.
    for chunk in filter(overlaps_gathers, chunks):
        chunk.reset_param_sync_dispatch_state()


def drop_reductions(chunks: Sequence[Any]) -> None:
    """Ends the reductions of a backward pass that failed, and forgets which gradients it had."""
    # The buckets would take both for the next pass's. A pass that ended has finished all of them.
    for group in _bucket_groups(chunks):
        if not group.grad_reduce_finished:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
            group.per_param_grad_ready_counts = {}


def _bucket_groups(chunks: Sequence[Any]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


@contextmanager
def accumulated_gradients(chunks: Sequence[Any], *, has_gradients: bool) -> Generator[None]:
    """Around a backward pass: adds its gradients to those of earlier passes, which an error loses."""
    # Megatron reduces the whole buffer over the ranks after every pass, and would reduce what is there already again.
    if not has_gradients:
        yield
        return
    held = [part.clone() for _, part, _ in _shards(chunks)]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    yield
    for (_, part, _), earlier in zip(_shards(chunks), held, strict=True):
        part.add_(earlier)


def gather_gradients(chunks: Sequence[Any]) -> dict[str, Tensor]:
    """Whole gradients by :func:`~rl_backend.runtime.bridge.model.conversion.parameter_key`, on every rank."""
    # Into the gradient buffers, whose other parts are of no use after a backward pass.
    for whole, part, group in _shards(chunks):
        if group.size() > 1:
            all_gather_into(whole, part.clone(), group=group)
    return {
        f"{stage}.{name}": parameter.main_grad
        for stage, model in enumerate(unwrap_model(list(chunks)))
        for name, parameter in model.named_parameters()
    }


def _shards(chunks: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor, dist.ProcessGroup]]:
    """Buckets of gradients, the part of each that this rank has reduced and its optimizer reads, the ranks with a part."""
    for chunk in chunks:
        # Experts are reduced over other ranks than the rest.
        for bucket_group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                yield bucket.grad_data, bucket.grad_data.chunk(group.size())[group.rank()], group
