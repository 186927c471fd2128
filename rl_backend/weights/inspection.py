"""What a receiver finds out about one tensor: its digest, and whether its values are finite."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import NamedTuple

from torch import Tensor

from rl_backend.weights.digest import BLOCK_BYTES, block_digest, blocks_of, join_digests, tensor_digest
from rl_backend.weights.finite import has_non_finite, non_finite_in


class Inspection(NamedTuple):
    """See the module."""

    digest: str
    finite: bool


def inspect_tensor(tensor: Tensor, pool: Executor | None = None) -> Inspection:
    """Reads a contiguous CPU tensor, once where there is no pool."""
    flat = tensor.reshape(-1)
    if pool is not None or not flat.is_floating_point() or not flat.numel():
        # torch sums with threads of its own, which the pool's cannot share out between them.
        return Inspection(tensor_digest(flat, pool), not has_non_finite(flat))
    start, digests, sums = flat.data_ptr(), [], []
    chunks = flat.split(BLOCK_BYTES // flat.itemsize)
    for block, chunk in zip(blocks_of(flat.nbytes), chunks, strict=True):
        digests.append(block_digest(start, block))
        sums.append(chunk.sum())
    return Inspection(join_digests(digests), not non_finite_in(chunks, sums))
