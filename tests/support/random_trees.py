"""Prefix trees drawn at random, their sequences in plain Python, and what is the same with and without them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl_backend.primitive.attention import Segments
from rl_backend.primitive.prefix_tree import PrefixTree

DEPTH = 4


def random_tree(seed: int, lengths: Sequence[int] = (1, 2, 3, 5)) -> PrefixTree:
    """One or two roots, paths of up to four runs; some sequences are equal, and some are the prefix of another.

    Args:
        lengths: of which every run has one.
    """
    draw = random.Random(seed)
    tree_lengths: list[int] = []
    parents: list[int] = []
    ends: list[int] = []

    def grow(parent: int, level: int) -> None:
        run = len(tree_lengths)
        tree_lengths.append(draw.choice(lengths))
        parents.append(parent)
        # The first path is of the whole depth.
        children = max(draw.randrange(3), int(run == level)) if level < DEPTH - 1 else 0
        for _ in range(children):
            grow(run, level + 1)
        ends.extend([run] * draw.choice((1, 1, 2) if children == 0 else (0, 0, 1)))

    for _ in range(draw.randint(1, 2)):
        grow(-1, 0)
    draw.shuffle(ends)
    return PrefixTree(tuple(tree_lengths), tuple(parents), tuple(ends))


class Unshared(NamedTuple):
    """The sequences of a tree, each whole."""

    rows: Tensor  # (T,) int64, the row of each token
    lengths: tuple[int, ...]

    @property
    def position_ids(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])

    @property
    def segments(self) -> Segments:
        starts = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        return Segments.of_sequences(starts, self.lengths)


def unshared(tree: PrefixTree) -> Unshared:
    own, row = [], 0
    for length in tree.lengths:
        own.append([*range(row, row + length)])
        row += length
    sequences: list[list[int]] = []
    for end in tree.ends:
        rows: list[int] = []
        run = end
        while run >= 0:
            rows = own[run] + rows
            run = tree.parents[run]
        sequences.append(rows)
    return Unshared(torch.tensor([row for rows in sequences for row in rows]), tuple(map(len, sequences)))


def require_same(found: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Values and, for a random mix of them, gradients of ``leaves``, relative to the largest value and to norms."""
    difference, largest = (found - expected).detach().abs().max(), expected.detach().abs().max()
    assert float(difference) <= tolerance * max(1.0, float(largest))
    mix = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=expected.dtype)
    gradients = [torch.autograd.grad((each * mix).sum(), leaves, allow_unused=True) for each in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        if one is None and other is None:
            continue
        assert one is not None and other is not None
        assert float((one - other).norm()) <= tolerance * float(other.norm())


def sequences_of_a_tree(seed: int, *, vocab_size: int = 128) -> list[Tensor]:
    """Token ids of a tree drawn at random, and those of its first sequence with one more: two begin alike in each."""
    tree, generator = random_tree(seed, (1, 1, 2, 5, 9)), torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (tree.num_rows + 1,), generator=generator)
    lengths = [tree.key_lens[end] for end in tree.ends]
    found = list(ids[tree.rows_of_tokens].split(lengths))
    return [*found, torch.cat((found[0], ids[-1:]))]


def distinct_beginnings(sequences: Sequence[Tensor]) -> int:
    """How many tokens there are when those with equal ones before them, and equal themselves, are one."""
    return len({tuple(ids[: end + 1].tolist()) for ids in sequences for end in range(len(ids))})
