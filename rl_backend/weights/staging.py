"""Staging buffers: layout, writing, and proof that a buffer holds what its manifest says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest
from rl_backend.weights.compare import as_announced, dtype_from_name
from rl_backend.weights.digest import block_threads, copy_with_digest, names_of_changed, overlapping
from rl_backend.weights.finite import inspect_tensor, refuse_non_finite

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
        intact: what :func:`find_intact` has found in this buffer since it was written. Those that are the manifest's, in
            place and digest as well, are not read again.

    Raises:
        WeightCheckError: tensors that lie outside the buffer, overlap, have another digest, or hold NaN or infinity.
    """
    _check_places(buffer, manifest.tensors)
    found = intact or {}
    left = [info for info in manifest.tensors if found.get(info.name) != info]
    with torch.no_grad(), block_threads(threads) as pool:
        inspections = [inspect_tensor(read_tensor(buffer, info), pool) for info in left]
    names = [info.name for info in left]
    changed = names_of_changed(names, (info.digest for info in left), (one.digest for one in inspections))
    if changed:
        raise WeightCheckError(
            f"{engine}: staged bytes differ from the manifest's digests, nothing was loaded: {', '.join(changed[:8])}; "
            "something else wrote to the staging buffer or the transfer was torn: push again",
            engine=engine,
            names=changed,
        )
    refuse_non_finite([name for name, one in zip(names, inspections, strict=True) if not one.finite], engine=engine)


def find_intact(buffer: Tensor, tensors: Sequence[TensorInfo], *, threads: int = 1) -> dict[str, TensorInfo]:
    """Those of a push's tensors, by name, that a (N,) uint8 CPU buffer holds with the right digest and finite values.

    For tensors that are staged already while others are not yet; :func:`check_staged` says what is wrong with the rest.

    Raises:
        WeightCheckError: tensors that lie outside the buffer or overlap.
    """
    _check_places(buffer, tensors)
    with torch.no_grad(), block_threads(threads) as pool:
        inspections = [inspect_tensor(read_tensor(buffer, info), pool) for info in tensors]
    pairs = zip(tensors, inspections, strict=True)
    return {info.name: info for info, one in pairs if one.finite and one.digest == info.digest}


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
    if overlapping((info.offset, info.nbytes) for info in tensors):
        raise WeightCheckError("tensors of the manifest overlap in the staging buffer")
