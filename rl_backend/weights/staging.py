"""Staging buffers: layout, writing, and the check that a buffer holds what its manifest says."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import pairwise

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest, dtype_from_name
from rl_backend.contracts.errors import listed
from rl_backend.weights.compare import as_announced
from rl_backend.weights.inspection import Inspection, block_threads, copy_with_digest, inspect_tensor

ALIGNMENT = 64
"""Bytes. A multiple of every dtype's size and of a cache line: a view of the buffer is an ordinary tensor."""


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


def read_tensor(buffer: Tensor, info: TensorInfo) -> Tensor:
    """A view, without a copy, of one tensor in a (N,) uint8 buffer."""
    part = buffer[info.offset : info.offset + info.nbytes]
    return part.view(dtype_from_name(info.dtype)).view(info.shape)


def write_tensors(
    buffer: Tensor,
    layout: Sequence[TensorInfo],
    weights: Iterable[tuple[str, Tensor]],
    *,
    version: int,
    threads: int = 1,
    staged: Callable[[TensorInfo], None] | None = None,
) -> WeightManifest:
    """Copies ``weights`` to their places in a (N,) uint8 CPU buffer and digests what was written.

    Args:
        buffer: at least as long as the layout needs.
        layout: tensors with offsets, in the order in which ``weights`` yields them.
        weights: (name, full tensor) on any device; a tensor may be reused once the next one is taken.
        version: weight version of the manifest.
        threads: threads that copy and digest.
        staged: told of each tensor, with its digest, once it is in its place for good.

    Raises:
        WeightCheckError: ``weights`` differ from the layout in a name, shape, dtype or number.
    """
    written: list[TensorInfo] = []
    with closing(as_announced(layout, weights)) as announced, block_threads(threads) as pool:
        for info, tensor in announced:
            written.append(info.replace(digest=copy_with_digest(read_tensor(buffer, info), tensor, pool)))
            if staged is not None:
                staged(written[-1])
    return WeightManifest(version=version, tensors=tuple(written))


def check_staged(
    buffer: Tensor,
    manifest: WeightManifest,
    *,
    engine: str,
    threads: int = 1,
    intact: Mapping[str, TensorInfo] | None = None,
) -> None:
    """Proves that a (N,) uint8 CPU buffer holds the manifest's tensors, unchanged and finite.

    Args:
        engine: who checks, for messages.
        threads: threads that digest.
        intact: tensors that :func:`find_intact` has found in this buffer since it was written. Those that agree with the
            manifest in place and digest are not read again.

    Raises:
        WeightCheckError: tensors that lie outside the buffer, overlap, have another digest, or hold NaN or infinity.
    """
    _check_places(buffer, manifest.tensors)
    found = intact or {}
    left = [info for info in manifest.tensors if found.get(info.name) != info]
    inspections = _inspect(buffer, left, threads)
    changed = [info.name for info, one in inspections if one.digest != info.digest]
    if changed:
        raise WeightCheckError(
            f"{engine}: staged bytes differ from the manifest's digests, nothing was loaded: {', '.join(changed[:8])}; "
            "something else wrote to the staging buffer or the transfer was torn: push again",
            engine=engine,
            names=changed,
        )
    damaged = [info.name for info, one in inspections if not one.finite]
    if damaged:
        raise WeightCheckError(
            f"{engine}: weights hold NaN or infinity and were not loaded: {listed(damaged, 8)}; the trainer's model is "
            "damaged: restore a checkpoint",
            engine=engine,
            names=damaged,
        )


def find_intact(buffer: Tensor, tensors: Sequence[TensorInfo], *, threads: int = 1) -> dict[str, TensorInfo]:
    """Those of a push's tensors, by name, that a (N,) uint8 CPU buffer holds with the right digest and finite values.

    Called while further tensors are still being staged; :func:`check_staged` says what is wrong with the rest.

    Raises:
        WeightCheckError: tensors that lie outside the buffer or overlap.
    """
    _check_places(buffer, tensors)
    inspections = _inspect(buffer, tensors, threads)
    return {info.name: info for info, one in inspections if one.finite and one.digest == info.digest}


def _inspect(buffer: Tensor, tensors: Sequence[TensorInfo], threads: int) -> list[tuple[TensorInfo, Inspection]]:
    with torch.no_grad(), block_threads(threads) as pool:
        return [(info, inspect_tensor(read_tensor(buffer, info), pool)) for info in tensors]


def _check_places(buffer: Tensor, tensors: Sequence[TensorInfo]) -> None:
    for info in tensors:
        size = info.num_elements * dtype_from_name(info.dtype).itemsize
        if info.nbytes != size:
            raise WeightCheckError(
                f"{info.name}: nbytes={info.nbytes}, but {info.shape} of {info.dtype} is {size}", name=info.name
            )
        if info.offset % 16 or info.offset + info.nbytes > buffer.numel():
            raise WeightCheckError(
                f"{info.name}: offset {info.offset} with {info.nbytes} bytes does not lie in a staging buffer of "
                f"{buffer.numel()} bytes at a multiple of 16",
                name=info.name,
            )
    ranges = sorted((info.offset, info.nbytes) for info in tensors if info.nbytes)
    if any(first + size > second for (first, size), (second, _) in pairwise(ranges)):
        raise WeightCheckError("tensors of the manifest overlap in the staging buffer")
