"""Digests of tensors and buffers without copying them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
import xxhash
from torch import Tensor


def tensor_digest(tensor: Tensor) -> str:
    """xxh3-64 of a contiguous CPU tensor's bytes, as 16 hexadecimal digits."""
    flat = tensor.reshape(-1)
    # Not through NumPy, which takes a tensor's memory for itself: a parameter's could not be offloaded any more.
    return str(xxhash.xxh3_64_hexdigest((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""))


def tensor_digests(tensors: Sequence[Tensor], threads: int) -> list[str]:
    """:func:`tensor_digest` of each, by up to ``threads`` threads (hashing a large buffer leaves the interpreter lock)."""
    if threads <= 1 or len(tensors) <= 1:
        return [tensor_digest(tensor) for tensor in tensors]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(tensor_digest, tensors))


CHECKSUM_BYTES = 1 << 26
"""Of memory that a checksum takes at most."""


def device_checksum(tensor: Tensor) -> Tensor:
    """0-d int64 checksum of a contiguous tensor's bytes, computed where the tensor is.

    The sum, modulo 2^64, of the bytes as 32-bit words (of single bytes when their number is not a multiple of 4). It finds
    a lost, torn or foreign part of a transfer; unlike a digest it does not see two words change places. Beside the tensor
    :data:`CHECKSUM_BYTES` are in memory: torch casts what it sums to int64 first.
    """
    flat = tensor.reshape(-1).view(torch.uint8)
    words = flat.numel() % 4 == 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in flat.split(CHECKSUM_BYTES // (2 if words else 8)) if flat.numel() else ():
        if words:
            # In a buffer of many tensors one may begin anywhere, where no view of words can.
            aligned = part if part.storage_offset() % 4 == 0 else part.clone()
            part = aligned.view(torch.int32)
        total += part.sum(dtype=torch.int64)
    return total


def names_of_changed(names: Iterable[str], expected: Iterable[object], found: Iterable[object]) -> list[str]:
    """The names whose expected and found digests differ."""
    return [name for name, left, right in zip(names, expected, found, strict=True) if left != right]


def overlapping(offsets_and_sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether any two (offset, size) ranges of bytes share a byte."""
    ranges = sorted((offset, size) for offset, size in offsets_and_sizes if size)
    return any(first + size > second for (first, size), (second, _) in pairwise(ranges))
