"""Digests, checksums and finiteness of tensors, in one pass over memory."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

# Of a tensor that are read at one time: what else is done with them finds them in the processor's cache.
BLOCK_BYTES = 1 << 20

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

# The bits of positive infinity.
_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F80_0000, torch.float64: 0x7FF0_0000_0000_0000}


class BlockThreads(ThreadPoolExecutor):
    """Threads that share the blocks of a tensor with the one that asks for it: ``others`` beside it."""

    def __init__(self, others: int) -> None:
        super().__init__(others)
        self.others = others

    def share[P, T](self, work: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        """``work`` of each part, in order. Every thread takes the next part when it has done one."""
        results: dict[int, T] = {}
        left = iter(range(len(parts)))

        def take() -> None:
            for number in left:
                results[number] = work(parts[number])

        # One message to each thread: one for each part would add a fifth to the time of a copy.
        asked = [self.submit(take) for _ in range(min(self.others, len(parts) - 1))]
        try:
            take()
        finally:
            wait(asked)
        for other in asked:
            other.result()
        return [results[number] for number in range(len(parts))]


def block_threads(threads: int) -> AbstractContextManager[BlockThreads | None]:
    """So many threads, the caller's own included; None where there is no other."""
    # Copying and digesting a block both leave the interpreter lock.
    return BlockThreads(threads - 1) if threads > 1 else nullcontext()


def tensor_digest(tensor: Tensor, pool: BlockThreads | None = None, *, by_rows: bool = False) -> str:
    """Digest of a CPU tensor's bytes, as 16 hexadecimal digits: the xxh3-64 of those of its blocks.

    The tensor is contiguous; or ``by_rows``, which has another digest, it is taken in runs of rows.
    """
    if by_rows:
        return join_digests(map(bytes.fromhex, each_run_of_rows(lambda run: tensor_digest(run.contiguous()), pool, tensor)))
    flat = tensor.reshape(-1)
    start = flat.data_ptr()
    return join_digests(each_block(flat.nbytes, lambda block: block_digest(start, block), pool))


def copy_with_digest(place: Tensor, tensor: Tensor, pool: BlockThreads | None = None, *, by_rows: bool = False) -> str:
    """Copies a tensor to a CPU tensor of its shape and dtype, contiguous or ``by_rows``. Returns the digest of what was
    written.
    """
    source = tensor.detach()
    if by_rows:

        def copy_rows(to: Tensor, run: Tensor) -> str:
            in_cache = run.to("cpu").contiguous()
            to.copy_(in_cache)
            return tensor_digest(in_cache)

        return join_digests(map(bytes.fromhex, each_run_of_rows(copy_rows, pool, place, source)))
    if source.device.type != "cpu" or not source.is_contiguous() or source.is_neg() or source.is_conj():
        place.copy_(source, non_blocking=False)
        return tensor_digest(place, pool)
    start, written = source.data_ptr(), place.data_ptr()

    def copy(block: range) -> bytes:
        ctypes.memmove(written + block.start, start + block.start, len(block))
        return block_digest(written, block)

    return join_digests(each_block(place.nbytes, copy, pool))


def block_digest(start: int, block: range) -> bytes:
    """xxh3-64 of the bytes at the addresses ``start + block.start`` to ``start + block.stop``."""
    return bytes(xxhash.xxh3_64_digest(_bytes_at(start + block.start, len(block))))


class RunningDigest:
    """xxh3-64 of a text, and of the bytes of tensors one after the other, however they are parted."""

    def __init__(self, text: str) -> None:
        self._hash = xxhash.xxh3_64(text.encode())

    def add(self, tensor: Tensor) -> None:
        """Of a tensor on the CPU, in the order of its numbers."""
        whole = tensor.contiguous()
        self._hash.update(_bytes_at(whole.data_ptr(), whole.nbytes))

    def __str__(self) -> str:
        """16 hexadecimal digits."""
        return str(self._hash.hexdigest())


def bits_of(tensor: Tensor) -> Any:
    """The elements of a contiguous CPU tensor, as (N,) unsigned numbers in its own memory: it must be kept as long."""
    return np.frombuffer(_bytes_at(tensor.data_ptr(), tensor.nbytes), f"u{tensor.itemsize}")


def _bytes_at(address: int, length: int) -> ctypes.Array[ctypes.c_char]:
    # Not through NumPy, which takes a tensor's memory for itself: a parameter's could not be offloaded any more.
    return (ctypes.c_char * length).from_address(address)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two CPU tensors have the same shape, dtype and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = one.contiguous(), other.contiguous()
    # torch's own comparison takes three times as long.
    return bool(_memcmp(left.data_ptr(), right.data_ptr(), left.nbytes) == 0)


def is_zero(tensor: Tensor) -> bool:
    """Whether a tensor holds nothing but zeros; on a CPU, nothing but zero bytes."""
    if tensor.device.type != "cpu":
        return not bool(tensor.any())
    whole = tensor.contiguous()
    start = whole.data_ptr()
    # The first byte is 0, and every other one what the byte before it is. torch's ``any`` takes several times as long.
    return not whole.nbytes or (_bytes_at(start, 1).raw == b"\0" and _memcmp(start, start + 1, whole.nbytes - 1) == 0)


def join_digests(digests: Iterable[bytes]) -> str:
    """A tensor's digest, of its blocks' digests."""
    return str(xxhash.xxh3_64_hexdigest(b"".join(digests)))


def each_block[T](nbytes: int, work: Callable[[range], T], pool: BlockThreads | None) -> list[T]:
    """``work`` of each block of that many bytes, in order; the last block may be shorter, and no bytes have none."""
    blocks = [range(first, min(first + BLOCK_BYTES, nbytes)) for first in range(0, nbytes, BLOCK_BYTES)]
    return list(map(work, blocks)) if pool is None else pool.share(work, blocks)


def each_run_of_rows[T](work: Callable[..., T], pool: BlockThreads | None, *tensors: Tensor) -> list[T]:
    """``work`` of the same rows of each of ``tensors``, which have one shape; about a block's bytes of each at one time."""
    rows = max(BLOCK_BYTES // max(tensors[0][:1].nbytes, 1), 1)
    runs = [tensor.split(rows) for tensor in tensors]
    return list(map(work, *runs)) if pool is None else pool.share(lambda parts: work(*parts), list(zip(*runs, strict=True)))


class Inspection(NamedTuple):
    """What one pass over a tensor finds: its digest, and whether all its values are finite."""

    digest: str
    finite: bool


def inspect_tensor(tensor: Tensor, pool: BlockThreads | None = None, *, by_rows: bool = False) -> Inspection:
    """Reads a CPU tensor, contiguous or ``by_rows``, as :func:`tensor_digest` does."""
    if by_rows:
        runs = each_run_of_rows(lambda run: inspect_tensor(run.contiguous()), pool, tensor)
        return Inspection(join_digests(bytes.fromhex(run.digest) for run in runs), all(run.finite for run in runs))
    flat = tensor.reshape(-1)
    if flat.dtype not in _INFINITY:
        return Inspection(tensor_digest(flat, pool), not has_non_finite(flat))
    start = flat.data_ptr()
    # torch's own sums would start threads for every block, and share them with whatever else this process computes.
    found = each_block(
        flat.nbytes, lambda block: (block_digest(start, block), _block_is_finite(start, block, flat.dtype)), pool
    )
    return Inspection(join_digests(digest for digest, _ in found), all(finite for _, finite in found))


def _block_is_finite(start: int, block: range, dtype: torch.dtype) -> bool:
    infinity, sign = _INFINITY[dtype], 1 << (8 * dtype.itemsize - 1)
    memory = _bytes_at(start + block.start, len(block))
    # Positive infinity and NaN are the largest signed numbers; with the sign bit set, the largest unsigned ones.
    return bool(
        np.frombuffer(memory, f"i{dtype.itemsize}").max() < infinity
        and np.frombuffer(memory, f"u{dtype.itemsize}").max() < sign | infinity
    )


def has_non_finite(tensor: Tensor) -> bool:
    """Whether a contiguous tensor holds NaN or infinity. Integer tensors never do."""
    if not tensor.is_floating_point():
        return False
    # ``isfinite().all()`` writes a mask and costs many times a copy. A sum is not finite when any addend is not, so chunks
    # are summed first; only one whose sum is not finite (it may also have overflowed) is looked at element by element.
    # A float16 sum overflows at 65504, so its chunks are small enough for ordinary weights to stay below.
    chunks = tensor.reshape(-1).split(1 << (20 if tensor.dtype == torch.float16 else 24))
    sums = torch.stack([chunk.sum() for chunk in chunks])
    suspects = (~sums.isfinite()).nonzero().flatten().tolist()
    return any(not bool(chunks[index].isfinite().all()) for index in suspects)


# Of memory that a checksum takes at most: torch casts what it sums to int64 first.
CHECKSUM_BYTES = 1 << 26


def device_checksum(tensor: Tensor) -> Tensor:
    """0-d int64 checksum of a contiguous tensor's bytes, computed where the tensor is.

    The sum, modulo 2^64, of the bytes as 32-bit words (of single bytes when their number is not a multiple of 4). Unlike a
    digest it does not see two words change places.
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
