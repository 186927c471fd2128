"""Patches: elements of a tensor that changed since it was sent, coded small.

A tensor is taken in runs of 1 MiB. Of a run a patch holds the elements that differ in any bit, or all of them where these
are about as many bytes. Each changed element is its value and the number of equal elements before it: one byte or two, with
the largest number for as many equal elements and no change behind them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_backend.contracts import WeightCheckError
from rl_backend.weights.inspection import BlockThreads, bits_of, each_block

# Bytes of a gap between changed elements; a run of width 0 is sent whole.
_WIDTHS = (1, 2)


class Patch(NamedTuple):
    """What brings one tensor to another.

    Attributes:
        table: (R, 3) int64, of each run the number of changed elements, the bytes of a gap (0: the run is sent whole) and
            the number of gaps.
        payload: (N,) uint8, of each run its gaps and then the values, or all values.
    """

    table: Tensor
    payload: Tensor

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.payload.nbytes

    @property
    def changed(self) -> int:
        return int(self.table[:, 0].sum())


def make_patch(held: Tensor, tensor: Tensor, pool: BlockThreads | None = None) -> Patch:
    """The patch that brings ``held`` to the bits of ``tensor``, which is done to ``held`` here.

    Both are contiguous CPU tensors of one shape and dtype. NaN differs from NaN, and 0.0 from -0.0, where their bits do.
    """
    before, now = bits_of(held), bits_of(tensor)
    runs = each_block(now.nbytes, lambda block: _patch_run(*(each[_elements(block, now)] for each in (before, now))), pool)
    return _joined(runs)


def empty_table(tensor: Tensor) -> Tensor:
    """The table, (R, 3) int64, of a patch of ``tensor`` that is yet to be received."""
    return torch.zeros(len(each_block(tensor.nbytes, id, None)), 3, dtype=torch.int64)


def payload_bytes(tensor: Tensor, table: Tensor) -> int:
    """Bytes of the payload that belongs to a table of a patch of ``tensor``."""
    return sum(len(gaps) + len(values) for _, gaps, values, _ in _parts(tensor, table))


def apply_patch(place: Tensor, patch: Patch) -> None:
    """Brings ``place``, a contiguous CPU tensor, to what the patch's maker had.

    What it had before is for the maker to know: only a digest shows whether the result is right.

    Raises:
        WeightCheckError: the patch is not one of such a tensor; a part of it may have been applied.
    """
    now, payload = bits_of(place), bits_of(patch.payload)
    for block, gaps, values, (count, width, _) in _parts(place, patch.table):
        run = now[_elements(block, now)]
        found = payload[values.start : values.stop].view(now.dtype)
        if not width:
            run[:] = found
            continue
        where = _indices(payload[gaps.start : gaps.stop].view(f"u{width}"))
        if len(where) != count or (count and where[-1] >= len(run)):
            raise WeightCheckError(f"a patch changes {len(where)} elements up to {where[-1:]} of {len(run)}, not {count}")
        run[where] = found


def _parts(tensor: Tensor, table: Tensor) -> Iterator[tuple[range, range, range, Any]]:
    """Of each run its bytes in the tensor, its gaps' and its values' in the payload, and its row of the table."""
    blocks = each_block(tensor.nbytes, lambda block: block, None)
    end = 0
    for block, row in zip(blocks, table.tolist(), strict=True):
        count, width, codes = row
        gaps = range(end, end + codes * width)
        end = gaps.stop + (count * tensor.itemsize if width else len(block))
        yield block, gaps, range(gaps.stop, end), row


def _elements(block: range, array: Any) -> slice:
    return slice(block.start // array.itemsize, block.stop // array.itemsize)


def _patch_run(held: Any, now: Any) -> tuple[tuple[int, int, int], list[Any]]:
    where = np.flatnonzero(held != now)
    held[:] = now
    if len(where) * (min(_WIDTHS) + now.itemsize) >= now.nbytes:
        return (len(where), 0, 0), [now.view("u1")]
    width, gaps = _gaps(where)
    return (len(where), width, len(gaps)), [gaps.view("u1"), now.take(where).view("u1")]


def _gaps(where: Any) -> tuple[int, Any]:
    gaps = np.diff(where, prepend=-1) - 1
    # Few gaps are so long, and dividing is slow.
    long = {width: np.flatnonzero(gaps >= _most(width)) for width in _WIDTHS}
    skips = {width: gaps[long[width]] // _most(width) for width in _WIDTHS}
    width = min(_WIDTHS, key=lambda each: each * (len(gaps) + skips[each].sum()))
    if not len(long[width]):
        return width, gaps.astype(f"u{width}")
    gaps[long[width]] -= skips[width] * _most(width)
    codes_of = np.ones(len(gaps), np.int64)
    codes_of[long[width]] += skips[width]
    codes = np.full(codes_of.sum(), _most(width), f"u{width}")
    codes[np.cumsum(codes_of) - 1] = gaps
    return width, codes


def _indices(codes: Any) -> Any:
    """Of elements whose gaps are coded so, (N,) int64."""
    (ends,) = np.nonzero(codes != np.iinfo(codes.dtype).max)
    return np.cumsum(codes, dtype=np.int64)[ends] + np.arange(len(ends))


def _most(width: int) -> int:
    return int(1 << 8 * width) - 1


def _joined(runs: list[tuple[tuple[int, int, int], list[Any]]]) -> Patch:
    table = torch.tensor([row for row, _ in runs], dtype=torch.int64).view(-1, 3)
    parts = [part for _, parts in runs for part in parts]
    return Patch(table, torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.uint8)))
