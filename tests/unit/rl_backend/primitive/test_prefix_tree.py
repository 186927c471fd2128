"""Runs that sequences share: their rows, and attention over their paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.data import prefixes
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.prefix_tree import PrefixTree, take_rows
from tests.support.random_trees import sequences_of_a_tree

TREE = PrefixTree(lengths=(3, 2, 1, 4), parents=(-1, 0, 0, -1), ends=(1, 2, 0, 3, 1))
"""Two sequences that are identical, one that continues the same prefix, the prefix itself, and one alone."""


def test_rows_of_runs_paths_and_tokens() -> None:
    assert (TREE.num_rows, TREE.starts) == (10, (0, 3, 5, 6))
    assert (TREE.lengths, TREE.key_lens) == ((3, 2, 1, 4), (3, 5, 4, 4))
    assert [TREE.path(run) for run in range(4)] == [(0,), (0, 1), (0, 2), (3,)]
    assert TREE.key_rows.tolist() == [0, 1, 2, *(0, 1, 2, 3, 4), *(0, 1, 2, 5), *(6, 7, 8, 9)]
    assert TREE.rows_of_tokens.tolist() == [0, 1, 2, 3, 4, *(0, 1, 2, 5), *(0, 1, 2), *(6, 7, 8, 9), *(0, 1, 2, 3, 4)]
    assert TREE.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
    padded = TREE.padded(4)
    assert (padded.lengths, padded.parents, padded.ends) == ((3, 2, 1, 4, 2), (-1, 0, 0, -1, -1), TREE.ends)
    assert padded.rows_of_tokens.tolist() == TREE.rows_of_tokens.tolist() and padded.padded(4) is padded
    alone = PrefixTree((2, 3), (-1, -1), (0, 1))
    assert TREE.shares and not alone.shares and alone._replace(ends=(0, 1, 1)).shares
    assert alone.rows_of_tokens.tolist() == alone.key_rows.tolist() == [0, 1, 2, 3, 4]
    assert (TREE.sequence_rows, padded.sequence_rows, alone.sequence_rows) == ((6, 0, 0, 4, 0), (6, 0, 0, 4, 0), (2, 3))


def test_gradients_of_a_row_are_those_of_all_that_take_it() -> None:
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        (take_rows(rows, torch.tensor([2, 0, 2, 2])) * torch.tensor([[1.0], [2], [3], [4]])).sum(), rows
    )
    assert gradient.tolist() == [[2, 2], [0, 0], [8, 8]]


@pytest.mark.shows(
    "model: attention over shared prefixes equals attention to whole sequences to 1e-12 in float64, gradients too"
)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_attention_over_a_tree_is_that_of_its_sequences(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_sinks: bool
) -> None:
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 1)
    for seed in range(10):
        sequences = sequences_of_a_tree(seed)
        tree = prefixes.grow(sequences)
        assert tree.shares and tree.num_tokens == sum(map(len, sequences))
        assert_as_whole_sequences(tree, window, (4, 2), has_sinks=has_sinks)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_long_runs_and_deep_ones_are_attended_to(has_sinks: bool) -> None:
    tree = PrefixTree((70, 90, 3, 65, 20), (-1, 0, 1, 0, -1), (3, 2, 1, 4))
    assert_as_whole_sequences(tree, None, (9, 3), has_sinks=has_sinks)


def assert_as_whole_sequences(tree: PrefixTree, window: int | None, heads: tuple[int, int], *, has_sinks: bool) -> None:
    generator = torch.Generator().manual_seed(tree.num_rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value = (random(tree.num_rows, *sizes) for sizes in ((heads[0], 8), (heads[1], 8), (heads[1], 6)))
    sinks = random(heads[0]) if has_sinks else None
    inputs = [each for each in (query, key, value, sinks) if each is not None]
    places, lengths = tree.rows_of_tokens, [tree.key_lens[end] for end in tree.ends]
    whole = Segments.of_sequences(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), lengths)
    mix = torch.randn(len(places), heads[0], 6, generator=generator, dtype=torch.float64)
    found = []
    for attended in (
        packed_attention(query, key, value, Segments.of_tree(tree), window, sinks)[places],
        packed_attention(query[places], key[places], value[places], whole, window, sinks),
    ):
        found.append((attended, *torch.autograd.grad((attended * mix).sum(), inputs)))
    torch.testing.assert_close(found[0], found[1], rtol=0.0, atol=1e-12)


def test_rows_are_counted_by_the_sequences_that_have_them() -> None:
    # The first run ends one sequence, and what continues it ends two and one.
    assert TREE.row_counts.tolist() == [4, 4, 4, 2, 2, 1, 1, 1, 1, 1] and TREE.row_counts.dtype == torch.int64
    assert TREE.padded(4).row_counts.tolist() == [*TREE.row_counts.tolist(), 0, 0], "rows that fill up are nobody's"
    assert TREE.num_tokens == TREE.padded(4).num_tokens == 21 == int(TREE.row_counts.sum())
    chain = PrefixTree((1, 2, 1, 1), (-1, 0, 1, 1), (2, 3, 3, 1))
    assert chain.row_counts.tolist() == [4, 4, 4, 1, 2] and chain.key_lens == (1, 3, 4, 4)
    assert chain.sequence_rows == (5, 0, 0, 0), "of whatever depth"
    # Of two roots the second is that of the first sequence.
    assert PrefixTree((2, 3, 1), (-1, -1, 0), (1, 2, 0)).sequence_rows == (3, 3, 0)
