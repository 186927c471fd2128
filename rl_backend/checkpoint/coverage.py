"""Whether rectangles cover a larger one exactly once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

MOST_SPLIT_DIMENSIONS = 8
"""Dimensions along which :func:`covers_once` takes a tensor to be split; its work doubles with each."""


def covers_once(whole: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether every element of ``whole`` is in exactly one of ``boxes``.

    Takes time in proportion to the number of boxes: how often each element is covered is a function whose differences along
    all dimensions are zero but at the corners of boxes, where they are 1 or -1. These add up to the corners of ``whole``
    alone if, and only if, the function is 1 everywhere in ``whole`` and 0 outside.

    Args:
        whole: sizes by dimension.
        boxes: (offsets, sizes) of each by dimension; those without an element count for nothing.

    Raises:
        ValueError: the boxes split more than ``MOST_SPLIT_DIMENSIONS`` dimensions.
    """
    if 0 in whole:
        return all(0 in sizes for _, sizes in boxes)
    filled = [box for box in boxes if 0 not in box[1]]
    split = [
        dimension
        for dimension, size in enumerate(whole)
        if any(offsets[dimension] != 0 or sizes[dimension] != size for offsets, sizes in filled)
    ]
    if len(split) > MOST_SPLIT_DIMENSIONS:
        raise ValueError(f"it is split along {len(split)} dimensions; {MOST_SPLIT_DIMENSIONS} at most are read")
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in filled:
        _add_corners(corners, [(offsets[i], offsets[i] + sizes[i]) for i in split], 1)
    _add_corners(corners, [(0, whole[i]) for i in split], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], spans: Sequence[tuple[int, int]], sign: int) -> None:
    for upper in itertools.product((0, 1), repeat=len(spans)):
        corner = tuple(span[side] for span, side in zip(spans, upper, strict=True))
        corners[corner] += -sign if sum(upper) % 2 else sign
