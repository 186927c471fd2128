"""Writing weights into a staging buffer, and proving that a buffer holds what its manifest says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest
from rl_backend.weights.announced import as_announced
from rl_backend.weights.digest import names_of_changed, overlapping, tensor_digests
from rl_backend.weights.dtypes import dtype_from_name
from rl_backend.weights.finite import check_finite


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
) -> WeightManifest:
    """Copies ``weights`` to their places in a (N,) uint8 CPU buffer and digests what was written.

    Args:
        buffer: at least as long as the layout needs.
        layout: tensors with offsets, in the order in which ``weights`` yields them.
        weights: (name, full tensor) on any device; a tensor may be reused once the next one is taken.
        version: weight version of the manifest.
        threads: threads that digest.

    Raises:
        WeightCheckError: ``weights`` differ from the layout in a name, shape, dtype or number.
    """
    written: list[Tensor] = []
    with closing(as_announced(layout, weights)) as announced:
        for info, tensor in announced:
            place = read_tensor(buffer, info)
            place.copy_(tensor.detach(), non_blocking=False)
            written.append(place)
    digests = tensor_digests(written, threads)
    return WeightManifest(
        version=version,
        tensors=tuple(info.replace(digest=digest) for info, digest in zip(layout, digests, strict=True)),
    )


def check_staged(buffer: Tensor, manifest: WeightManifest, *, engine: str, threads: int = 1) -> None:
    """Proves that a (N,) uint8 CPU buffer holds the manifest's tensors, unchanged and finite.

    Args:
        engine: who checks, for messages.
        threads: threads that digest.

    Raises:
        WeightCheckError: tensors that lie outside the buffer, overlap, have another digest, or hold NaN or infinity.
    """
    _check_places(buffer, manifest)
    names = [info.name for info in manifest.tensors]
    tensors = [read_tensor(buffer, info) for info in manifest.tensors]
    changed = names_of_changed(names, (info.digest for info in manifest.tensors), tensor_digests(tensors, threads))
    if changed:
        raise WeightCheckError(
            f"{engine}: staged bytes differ from the manifest's digests, nothing was loaded: {', '.join(changed[:8])}; "
            "something else wrote to the staging buffer or the transfer was torn: push again",
            engine=engine,
            names=changed,
        )
    with torch.no_grad():
        check_finite(zip(names, tensors, strict=True), engine=engine)


def _check_places(buffer: Tensor, manifest: WeightManifest) -> None:
    for info in manifest.tensors:
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
    if overlapping((info.offset, info.nbytes) for info in manifest.tensors):
        raise WeightCheckError("tensors of the manifest overlap in the staging buffer")
