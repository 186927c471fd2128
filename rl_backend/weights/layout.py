"""Where each tensor lies in a staging buffer."""

from __future__ import annotations

from collections.abc import Iterable

from rl_backend.contracts import TensorInfo

ALIGNMENT = 64
"""Bytes. A multiple of every dtype's size and of a cache line, so that a view of the buffer is an ordinary tensor."""


def plan_layout(tensors: Iterable[TensorInfo]) -> tuple[tuple[TensorInfo, ...], int]:
    """Gives every tensor an aligned offset, in order.

    Returns:
        The tensors with ``offset`` set, and the bytes that the buffer needs (at least one alignment unit).
    """
    placed: list[TensorInfo] = []
    end = 0
    for tensor in tensors:
        placed.append(tensor.replace(offset=end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed), max(end, ALIGNMENT)
