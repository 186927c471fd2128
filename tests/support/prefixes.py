"""Sequences that begin alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


def sequences_of_a_tree(seed: int, *, depth: int = 4, most: int = 12, vocab_size: int = 128) -> list[Tensor]:
    """In random order, of runs of 1 to 9 tokens; some are identical, and some the beginning of another."""
    drawn = random.Random(seed)

    def grown(beginning: list[int], level: int) -> list[list[int]]:
        own = beginning + [drawn.randrange(vocab_size) for _ in range(drawn.choice((1, 1, 2, 5, 9)))]
        found = [own] * drawn.choice((0, 0, 1, 2))
        for _ in range(0 if level == depth else drawn.choice((0, 1, 2, 3))):
            found += grown(own, level + 1)
        return found or [own]

    found = grown([], 1) + grown([], 1) + grown([], 1)
    drawn.shuffle(found)
    # At least two that begin alike.
    chosen = found[:most]
    return [torch.tensor(each) for each in [*chosen, [*chosen[0], drawn.randrange(vocab_size)]]]


def distinct_beginnings(sequences: Sequence[Tensor]) -> int:
    """How many tokens there are when those with equal ones before them, and equal themselves, are one."""
    return len({tuple(ids[: end + 1].tolist()) for ids in sequences for end in range(len(ids))})
