"""NaN and infinity in weights, found at the price of one pass over memory.

``isfinite().all()`` writes a mask and costs many times a copy. A sum is not finite when any addend is not, so each chunk is
summed first; only a chunk whose sum is not finite (its sum may also have overflowed) is looked at element by element.
"""

import ctypes
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_backend.weights.digest import block_digest, each_block, join_digests, tensor_digest

_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F80_0000, torch.float64: 0x7FF0_0000_0000_0000}
"""The bits of positive infinity."""


class Inspection(NamedTuple):
    """See the module."""

    digest: str
    finite: bool


def inspect_tensor(tensor: Tensor, pool: Executor | None = None) -> Inspection:
    """Reads a contiguous CPU tensor.

    torch's own sums would start threads for every block, and share them with whatever else this process computes.
    """
    flat = tensor.reshape(-1)
    if flat.dtype not in _INFINITY:
        return Inspection(tensor_digest(flat, pool), not has_non_finite(flat))
    start = flat.data_ptr()
    found = each_block(
        flat.nbytes, lambda block: (block_digest(start, block), _block_is_finite(start, block, flat.dtype)), pool
    )
    return Inspection(join_digests(digest for digest, _ in found), all(finite for _, finite in found))


def _block_is_finite(start: int, block: range, dtype: torch.dtype) -> bool:
    infinity, sign = _INFINITY[dtype], 1 << (8 * dtype.itemsize - 1)
    memory = (ctypes.c_char * len(block)).from_address(start + block.start)
    # Positive infinity and NaN are the largest signed numbers; with the sign bit set, the largest unsigned ones.
    return bool(
        np.frombuffer(memory, f"i{dtype.itemsize}").max() < infinity
        and np.frombuffer(memory, f"u{dtype.itemsize}").max() < sign | infinity
    )


def has_non_finite(tensor: Tensor) -> bool:
    """Whether a contiguous tensor holds NaN or infinity. Integer tensors never do."""
    if not tensor.is_floating_point():
        return False
    # A float16 sum overflows at 65504, so its chunks are small enough for ordinary weights to stay below.
    chunks = tensor.reshape(-1).split(1 << (20 if tensor.dtype == torch.float16 else 24))
    sums = torch.stack([chunk.sum() for chunk in chunks])
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()
    return any(not bool(chunks[index].isfinite().all()) for index in suspects)
