"""Work that Megatron's DDP postpones to the next pass with ``overlap_param_gather`` and ``overlap_grad_reduce``."""

from collections.abc import Iterator, Sequence
from typing import Any


def overlaps_gathers(chunk: Any) -> bool:
    """Whether forward passes gather what the optimizer wrote, each bucket when a module needs it."""
    return bool(chunk.ddp_config.overlap_param_gather)


def wait_for_gathers(chunks: Sequence[Any]) -> None:
    """Before the optimizer writes what they read: a forward pass that failed may have begun one that no module awaits."""
    for chunk in filter(overlaps_gathers, chunks):
        chunk.free_overlap_buffers()


def gather_again(chunks: Sequence[Any]) -> None:
    """After the optimizer wrote: makes the next forward pass gather.

    The end of a backward pass marks buckets as not gathered, and whatever gathers between it and the step as gathered:
    forward-only passes, exports, checkpoints.
    """
    for chunk in filter(overlaps_gathers, chunks):
        chunk.reset_param_sync_dispatch_state()


def drop_reductions(chunks: Sequence[Any]) -> None:
    """Ends the reductions of a backward pass that failed, and forgets which gradients it had.

    The buckets would take both for the next pass's. A pass that ended has finished all of them.
    """
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
