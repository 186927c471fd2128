"""Rectangles of a tensor that together are one span of its flattened elements."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A rectangle of a tensor.

    Attributes:
        offsets, sizes: by dimension.
        start: of its first element in the flattened tensor; its elements follow each other there.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements ``start`` to ``end`` of a flattened tensor as rectangles, at most ``2 * len(shape) - 1``, in order."""
    if start >= end:
        return
    if not shape:
        yield Box((), (), start)
        return
    inner = shape[1:]
    row = math.prod(inner)
    index = start // row
    if start % row or end - start < row:
        stop = min(end, (index + 1) * row)
        for box in boxes(inner, start - index * row, stop - index * row):
            yield Box((index, *box.offsets), (1, *box.sizes), box.start + index * row)
    else:
        rows = (end - start) // row
        stop = start + rows * row
        yield Box((index, *[0] * len(inner)), (rows, *inner), start)
    yield from boxes(shape, stop, end)
