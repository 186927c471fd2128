"""Weights on their way to engines: what is announced, staged, checked, and what an engine expects."""

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from rl_backend.contracts import (
    TensorInfo,
    TensorPart,
    WeightCheckError,
    WeightManifest,
    dtype_from_name,
    name_of_dtype,
)
from rl_backend.contracts.errors import listed
from rl_backend.parallel.shards import covers_once
from rl_backend.weights.inspection import Inspection, block_threads, copy_with_digest, inspect_tensor


def as_announced[I: TensorInfo](infos: Sequence[I], weights: Iterable[tuple[str, Tensor]]) -> Generator[tuple[I, Tensor]]:
    """Each of ``infos`` with its tensor, before anything is done with the tensor.

    ``weights``, in general a collective's generator, are closed with this one or when they differ, which tells other ranks.
    The name of a rectangle is its text (:class:`~rl_backend.contracts.TensorPart`).

    Raises:
        WeightCheckError: ``weights`` differ from ``infos`` in a name, shape, dtype or number.
    """
    iterator = iter(weights)
    try:
        # The receiver places weights as announced: two swapped tensors of one size would arrive with right digests under
        # each other's names. None stands for the end, behind which nothing may come.
        for place, info in enumerate([*infos, None]):
            name, tensor = next(iterator, (None, None))
            found = None if tensor is None else (name, tuple(tensor.shape), name_of_dtype(tensor.dtype))
            announced = None if info is None else (str(info), info.shape, info.dtype)
            if found != announced:
                raise WeightCheckError(
                    f"the export yielded {found or 'no more tensors'} after {place} of {len(infos)}, but announced "
                    f"{announced or 'no more'}; nothing of it was sent: the runtime's weight_infos and export_weights, or "
                    "shard_infos and export_shards, must agree in names and order",
                    name=name,
                )
            if info is not None and tensor is not None:
                yield info, tensor
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


_SHOWN = 8


@dataclass(frozen=True)
class ExpectedWeights:
    """The weights that an engine loads.

    Attributes:
        required: name -> tensor that every push must hold.
        optional: name -> tensor that a push may hold (for example ``lm_head.weight`` of a model that ties it).
        fused_groups: names that are loaded into one parameter, of which a part would leave the rest undefined.
        in_float32: names of tensors that the engine keeps in float32 whatever its dtype; a push may send them so.
    """

    required: Mapping[str, TensorInfo]
    optional: Mapping[str, TensorInfo] = field(default_factory=dict)
    fused_groups: Sequence[tuple[str, ...]] = ()
    in_float32: frozenset[str] = frozenset()


def find_mismatches(
    offered: Sequence[TensorInfo], expected: ExpectedWeights, kept: Collection[str] = frozenset()
) -> list[str]:
    """One sentence for every kind of mismatch, each with the names concerned; names in ``kept`` need not be offered."""
    names = {tensor.name for tensor in offered}
    known = {**expected.required, **expected.optional}
    halves = [group for group in expected.fused_groups if 0 < len(names.intersection(group)) < len(group)]
    in_halves = {name for group in halves for name in group}
    pairs = [(tensor, known[tensor.name]) for tensor in offered if tensor.name in known]
    found = {
        "missing": [name for name in expected.required if name not in names and name not in in_halves and name not in kept],
        "unknown to the engine": [tensor.name for tensor in offered if tensor.name not in known],
        "wrong shape": [
            f"{tensor.name} is {tensor.shape}, the engine has {own.shape}"
            for tensor, own in pairs
            if tensor.shape != own.shape
        ],
        "wrong dtype": [
            f"{tensor.name} is {tensor.dtype}, the engine takes {own.dtype}"
            for tensor, own in pairs
            if tensor.dtype != own.dtype and not (tensor.dtype == "float32" and tensor.name in expected.in_float32)
        ],
    }
    return [
        *(
            f"half of a fused group: {', '.join(name for name in group if name in names)} came without "
            f"{', '.join(name for name in group if name not in names)}"
            for group in halves[:_SHOWN]
        ),
        *(f"{problem}: {listed(wrong, _SHOWN)}" for problem, wrong in found.items() if wrong),
    ]


def check_manifest(manifest: WeightManifest, expected: ExpectedWeights, *, engine: str) -> None:
    """Raises :class:`~rl_backend.contracts.WeightCheckError` with every mismatch between a push and an engine."""
    problems = find_mismatches(manifest.tensors, expected, frozenset(manifest.kept))
    if problems:
        raise WeightCheckError(
            f"{engine} refuses weights of version {manifest.version}, nothing was loaded: {'; '.join(problems)}",
            engine=engine,
            version=manifest.version,
            problems=problems,
        )


# Bytes: a multiple of every dtype's size and of a cache line, so that a view of the buffer is an ordinary tensor.
ALIGNMENT = 64


def plan_layout[I: TensorInfo](tensors: Iterable[I]) -> tuple[tuple[I, ...], int]:
    """The tensors with aligned offsets, in order, and the bytes that the buffer needs (at least one alignment unit)."""
    placed: list[I] = []
    end = 0
    for tensor in tensors:
        placed.append(tensor.replace(offset=end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed), max(end, ALIGNMENT)


def read_tensor(buffer: Tensor, info: TensorInfo) -> Tensor:
    """A view, without a copy, of one tensor, or a rectangle of it, in a (N,) uint8 buffer."""
    whole = buffer[info.offset : info.offset + info.extent].view(dtype_from_name(info.dtype))
    return whole.view(info.whole)[info.region] if isinstance(info, TensorPart) else whole.view(info.shape)


def write_tensors[I: TensorInfo](
    buffer: Tensor,
    layout: Sequence[I],
    weights: Iterable[tuple[str, Tensor]],
    *,
    threads: int = 1,
    staged: Callable[[I], None] | None = None,
) -> tuple[I, ...]:
    """Copies ``weights`` to their places in a (N,) uint8 CPU buffer; ``layout`` with the digests of what was written.

    Args:
        layout: tensors or rectangles with offsets, in the order in which ``weights`` yields them.
        weights: (name, tensor) as :func:`as_announced` takes them, on any device; a tensor may be reused once the next one
            is taken.
        threads: that copy and digest.
        staged: told of each tensor, with its digest, once it is in its place for good.

    Raises:
        WeightCheckError: ``weights`` differ from the layout in a name, shape, dtype or number.
    """
    written: list[I] = []
    with closing(as_announced(layout, weights)) as announced, block_threads(threads) as pool:
        for info, tensor in announced:
            digest = copy_with_digest(read_tensor(buffer, info), tensor, pool, by_rows=info.by_rows)
            written.append(info.replace(digest=digest))
            if staged is not None:
                staged(written[-1])
    return tuple(written)


def require_covered(tensors: Sequence[TensorInfo], parts: Iterable[TensorPart]) -> None:
    """Proves that rectangles are ``tensors``, every element once; raises :class:`WeightCheckError` naming a tensor that is
    not.
    """
    found: dict[str, list[TensorPart]] = {info.name: [] for info in tensors}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    for info in tensors:
        of_tensor = found.pop(info.name)
        place = (info.shape, info.dtype, info.offset)
        boxes = tuple((part.start, part.shape) for part in of_tensor)
        if not (all((part.whole, part.dtype, part.offset) == place for part in of_tensor) and _covers(info.shape, boxes)):
            sent = listed([f"{part} of rank {part.rank}" for part in of_tensor], _SHOWN) or "none"
            raise WeightCheckError(
                f"{info.name}: the rectangles that are sent must be {info.dtype} {info.shape}, every element once, and are "
                f"{sent}; nothing was loaded: the runtime's shard_infos and weight_infos differ",
                name=info.name,
            )
    if found:
        raise WeightCheckError(f"rectangles of tensors that are not pushed: {listed(sorted(found), _SHOWN)}")


# Layers are alike.
_covers = lru_cache(4096)(covers_once)


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
        intact: pieces that :func:`find_intact` has found in this buffer since it was written. Those that agree with the
            manifest in place and digest are not read again.

    Raises:
        WeightCheckError: tensors that lie outside the buffer, overlap, have another digest, or hold NaN or infinity; or
            rectangles that are not the tensors, every element once.
    """
    _check_places(buffer, manifest.placed)
    if manifest.parts:
        # What no rectangle covers is what the buffer held before, and has no digest.
        require_covered(manifest.placed, manifest.parts)
    found = intact or {}
    left = [info for info in manifest.pieces if found.get(str(info)) != info]
    inspections = _inspect(buffer, left, threads)
    changed = [str(info) for info, one in inspections if one.digest != info.digest]
    if changed:
        raise WeightCheckError(
            f"{engine}: staged bytes differ from the manifest's digests, nothing was loaded: {', '.join(changed[:8])}; "
            "something else wrote to the staging buffer or the transfer was torn: push again",
            engine=engine,
            names=changed,
        )
    damaged = [str(info) for info, one in inspections if not one.finite]
    if damaged:
        raise WeightCheckError(
            f"{engine}: weights hold NaN or infinity and were not loaded: {listed(damaged, 8)}; the trainer's model is "
            "damaged: restore a checkpoint",
            engine=engine,
            names=damaged,
        )


def find_intact(buffer: Tensor, tensors: Sequence[TensorInfo], *, threads: int = 1) -> dict[str, TensorInfo]:
    """Those of a push's pieces, by their text, that a (N,) uint8 CPU buffer holds with the right digest and finite values.

    Called while further tensors are still being staged. Raises :class:`WeightCheckError` for tensors that lie outside the
    buffer or overlap; :func:`check_staged` says what is wrong with the rest.
    """
    _check_places(buffer, tensors)
    inspections = _inspect(buffer, tensors, threads)
    return {str(info): info for info, one in inspections if one.finite and one.digest == info.digest}


def _inspect(buffer: Tensor, tensors: Sequence[TensorInfo], threads: int) -> list[tuple[TensorInfo, Inspection]]:
    with torch.no_grad(), block_threads(threads) as pool:
        return [(info, inspect_tensor(read_tensor(buffer, info), pool, by_rows=info.by_rows)) for info in tensors]


def _check_places(buffer: Tensor, tensors: Sequence[TensorInfo]) -> None:
    for info in tensors:
        size = info.num_elements * dtype_from_name(info.dtype).itemsize
        # Kernels read 16 bytes at a time.
        if info.nbytes != size or info.offset % 16 or info.offset + info.extent > buffer.numel():
            raise WeightCheckError(
                f"{info.name}: {info.nbytes} bytes at offset {info.offset} are not {info.shape} of {info.dtype}, or do not "
                f"lie in a staging buffer of {buffer.numel()} bytes at a multiple of 16",
                name=info.name,
            )
    # Rectangles of one tensor lie in one place.
    ranges = sorted({(info.offset, info.extent, info.name) for info in tensors if info.nbytes})
    if any(first + size > second for (first, size, _), (second, *_) in pairwise(ranges)):
        raise WeightCheckError("tensors of the manifest overlap in the staging buffer")
