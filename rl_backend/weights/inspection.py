"""What a receiver finds out about one tensor in one pass: its digest, and whether its values are finite."""

from __future__ import annotations

import ctypes
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_backend.weights.digest import block_digest, each_block, join_digests, tensor_digest
from rl_backend.weights.finite import has_non_finite


class _Bits(NamedTuple):
    """How a dtype stores infinity: as signed and as unsigned whole numbers, NaN and infinity are the largest."""

    signed: Any
    unsigned: Any
    infinity: int
    sign: int


_BITS = {
    torch.float16: _Bits(np.int16, np.uint16, 0x7C00, 1 << 15),
    torch.bfloat16: _Bits(np.int16, np.uint16, 0x7F80, 1 << 15),
    torch.float32: _Bits(np.int32, np.uint32, 0x7F80_0000, 1 << 31),
    torch.float64: _Bits(np.int64, np.uint64, 0x7FF0_0000_0000_0000, 1 << 63),
}


class Inspection(NamedTuple):
    """See the module."""

    digest: str
    finite: bool


def inspect_tensor(tensor: Tensor, pool: Executor | None = None) -> Inspection:
    """Reads a contiguous CPU tensor.

    torch's own sums would start threads for every block, and share them with whatever else this process computes.
    """
    flat = tensor.reshape(-1)
    bits = _BITS.get(flat.dtype)
    if bits is None:
        return Inspection(tensor_digest(flat, pool), not has_non_finite(flat))
    start = flat.data_ptr()
    found = each_block(flat.nbytes, lambda block: (block_digest(start, block), _block_is_finite(start, block, bits)), pool)
    return Inspection(join_digests(digest for digest, _ in found), all(finite for _, finite in found))


def _block_is_finite(start: int, block: range, bits: _Bits) -> bool:
    memory = (ctypes.c_char * len(block)).from_address(start + block.start)
    # Positive infinity and NaN are the largest signed numbers; with the sign bit set, the largest unsigned ones.
    return bool(
        np.frombuffer(memory, bits.signed).max() < bits.infinity
        and np.frombuffer(memory, bits.unsigned).max() < bits.sign | bits.infinity
    )
