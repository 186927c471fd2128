"""Whether rectangles cover a tensor exactly once, beside counting every element."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from rl_backend.checkpoint.training_state import boxes
from rl_backend.parallel.shards import MOST_SPLIT_DIMENSIONS, covers_once

type Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def counted(whole: tuple[int, ...], rectangles: list[Rectangle]) -> bool:
    counts = np.zeros(whole, dtype=int)
    for offsets, sizes in rectangles:
        counts[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())


def split(draw: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> list[Rectangle]:
    """Cut at random places, again and again."""
    if draw.random() < 0.25 or not sizes or max(sizes) < 2:
        return [(offsets, sizes)]
    axis = draw.choice([axis for axis, size in enumerate(sizes) if size > 1])
    cut = draw.randrange(1, sizes[axis])

    def part(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    return [
        *split(draw, offsets, part(sizes, cut)),
        *split(draw, part(offsets, offsets[axis] + cut), part(sizes, sizes[axis] - cut)),
    ]


def test_it_agrees_with_counting_for_random_pieces_and_for_damaged_ones() -> None:
    draw = random.Random(0)
    found = {True: 0, False: 0}
    for _ in range(1500):
        whole = tuple(draw.randrange(1, 6) for _ in range(draw.randrange(4)))
        pieces = split(draw, (0,) * len(whole), whole)
        draw.shuffle(pieces)
        match draw.randrange(4):
            case 0:
                pieces.pop()
            case 1:
                pieces.append(draw.choice(pieces))
            case 2:
                pieces[0] = draw.choice(pieces)
        expected = counted(whole, pieces)
        assert covers_once(whole, pieces) == expected, (whole, pieces)
        found[expected] += 1
    assert min(found.values()) > 300


def test_equal_sums_of_sizes_do_not_make_a_cover() -> None:
    assert not covers_once((4, 2), [((0, 0), (2, 2)), ((0, 0), (2, 2))])
    assert not covers_once((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert covers_once((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))])
    assert not covers_once((4,), [((2,), (4,))]), "as large as the whole, and beside it"
    assert not covers_once((4, 2), [((0, 0), (4, 2)), ((0, 1), (4, 2))])


def test_pieces_without_elements_count_for_nothing() -> None:
    assert covers_once((3, 2), [((0, 0), (3, 2)), ((3, 0), (0, 2))])
    assert covers_once((0, 2), [])
    assert covers_once((0, 2), [((0, 0), (0, 2))])
    assert not covers_once((3, 2), [((3, 0), (0, 2))])
    assert covers_once((), [((), ())])
    assert not covers_once((), [])
    assert not covers_once((), [((), ()), ((), ())])


def test_thousands_of_pieces_take_no_time() -> None:
    rows = [((0, column), (2, 1)) for column in range(20_000)]
    flat = [
        (box.offsets, box.sizes)
        for start in range(0, 300_000, 37)
        for box in boxes((300, 1000), start, min(start + 37, 300_000))
    ]
    began = time.perf_counter()
    assert covers_once((2, 20_000), rows)
    assert covers_once((300, 1000), flat)
    assert not covers_once((300, 1000), flat[1:])
    assert time.perf_counter() - began < 5


def test_a_tensor_that_is_split_everywhere_is_not_worked_on_for_ever() -> None:
    whole = (2,) * 40
    halves = [((0,) * 40, (1,) * 40)]
    with pytest.raises(ValueError, match=f"split along 40 dimensions; {MOST_SPLIT_DIMENSIONS} at most"):
        covers_once(whole, halves)
    assert covers_once((1,) * 40, [((0,) * 40, (1,) * 40)])
