"""What Megatron's DDP leaves for the next pass, with ``overlap_param_gather``."""

from collections.abc import Sequence
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
