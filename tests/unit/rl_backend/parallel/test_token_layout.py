"""Which tokens a context-parallel rank has."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from rl_backend.parallel.context import TokenLayout, lay_out_tokens, lay_out_tree
from rl_backend.primitive.prefix_tree import PrefixTree

LAYOUTS = [(cp_size, multiple) for cp_size in (1, 2, 4) for multiple in (1, 2, 4)]


def micro_batches() -> Iterator[list[int]]:
    """Lengths around every multiple of the chunks, and random ones."""
    yield from ([1], [1, 1, 1], [8], [7, 8, 9, 16, 17], [3, 100, 1])
    generator = random.Random(0)
    for _ in range(20):
        yield [generator.choice([1, 2, 5, generator.randint(1, 70)]) for _ in range(generator.randint(1, 8))]


def lay_out_ranks(seq_lens: list[int], cp_size: int, multiple: int) -> list[TokenLayout]:
    return [lay_out_tokens(seq_lens, cp_size=cp_size, cp_rank=rank, multiple=multiple) for rank in range(cp_size)]


@pytest.mark.parametrize(("cp_size", "multiple"), LAYOUTS)
def test_every_token_is_on_one_rank_and_places_finds_it(cp_size: int, multiple: int) -> None:
    for seq_lens in micro_batches():
        ranks = lay_out_ranks(seq_lens, cp_size, multiple)
        rows = torch.cat([layout.index for layout in ranks])
        tokens = torch.arange(sum(seq_lens))
        assert torch.equal(rows[rows >= 0].sort().values, tokens)
        assert all(torch.equal(rows[layout.places], tokens) for layout in ranks)
        assert len({len(layout.index) for layout in ranks}) == 1
        assert len(ranks[0].index) % multiple == 0


@pytest.mark.parametrize(("cp_size", "multiple"), LAYOUTS)
def test_position_ids_start_at_zero_with_every_sequence(cp_size: int, multiple: int) -> None:
    for seq_lens in micro_batches():
        positions = torch.cat([torch.arange(length) for length in seq_lens])
        for layout in lay_out_ranks(seq_lens, cp_size, multiple):
            real = layout.index >= 0
            assert torch.equal(layout.position_ids[real], positions[layout.index[real]])


@pytest.mark.parametrize(("cp_size", "multiple"), LAYOUTS)
def test_the_keys_of_a_segment_are_its_sequence_up_to_its_last_query(cp_size: int, multiple: int) -> None:
    for seq_lens in micro_batches():
        sequence_of = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
        ranks = lay_out_ranks(seq_lens, cp_size, multiple)
        rows, row_positions = (torch.cat([getattr(x, name) for x in ranks]) for name in ("index", "position_ids"))
        for rank, layout in enumerate(ranks):
            segments, own = layout.segments, len(layout.index) * rank + torch.arange(len(layout.index))
            assert segments.cu_queries.tolist()[1:] == torch.tensor(segments.query_lens).cumsum(0).tolist()
            assert segments.cu_keys.tolist()[1:] == torch.tensor(segments.key_lens).cumsum(0).tolist()
            assert segments.cu_queries[-1] == len(own)
            assert (segments.key_index is None) == (cp_size == 1)
            key_index = own if segments.key_index is None else segments.key_index
            for queries, keys in zip(own.split(segments.query_lens), key_index.split(segments.key_lens), strict=True):
                assert torch.equal(keys[-len(queries) :], queries)
                assert torch.equal(row_positions[keys], torch.arange(len(keys)))
                real = rows[keys] >= 0
                assert len(set(sequence_of[rows[keys][real]].tolist())) <= 1
                # Padding follows the tokens, so that no token sees it.
                assert not bool(real[int(real.sum()) :].any())


@pytest.mark.parametrize("cp_size", [2, 4])
def test_every_rank_has_the_same_work(cp_size: int) -> None:
    for seq_lens in micro_batches():
        seen = [
            sum(q * k - q * (q - 1) // 2 for q, k in zip(layout.segments.query_lens, layout.segments.key_lens, strict=True))
            for layout in lay_out_ranks(seq_lens, cp_size, 4)
        ]
        assert len(set(seen)) == 1


@pytest.mark.parametrize(("cp_size", "multiple"), LAYOUTS)
def test_padding_is_bounded_and_absent_where_lengths_divide(cp_size: int, multiple: int) -> None:
    for seq_lens in micro_batches():
        layouts = lay_out_ranks(seq_lens, cp_size, multiple)
        padded = sum(len(layout.index) for layout in layouts) - sum(seq_lens)
        assert padded <= len(seq_lens) * (2 * cp_size - 1 if cp_size > 1 else 0) + cp_size * (multiple - 1)
        for layout in layouts:
            expected = layout.index < 0
            assert torch.equal(expected, torch.zeros_like(expected) if layout.padding is None else layout.padding)
    assert all(layout.padding is None for layout in lay_out_ranks([16, 32], cp_size, multiple))


def test_taking_fields_of_tokens_fills_padding() -> None:
    layout = lay_out_tokens([5, 1], cp_size=2, cp_rank=0, multiple=4)
    labels = torch.tensor([10, 11, 12, 13, -100, 15])
    assert layout.take(labels, -100).tolist() == [10, 11, -100, -100, 15, -100, -100, -100]
    routes = torch.arange(12).view(6, 2)
    assert layout.take(routes, -1).tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1], [10, 11], [-1, -1], [-1, -1], [-1, -1]]
    alone = lay_out_tokens([2], cp_size=1, cp_rank=0)
    assert alone.take(torch.tensor([0.5, 1.5]), 1.0).tolist() == [0.5, 1.5]


def test_a_tree_is_filled_up_with_rows_that_stand_for_no_token() -> None:
    # Two sequences of 3 and 4 tokens that begin with the same two.
    tree = PrefixTree((2, 1, 2), (-1, 0, 0), (1, 2))
    for multiple, fillers in ((1, 0), (5, 0), (4, 3)):
        layout = lay_out_tree(tree, multiple=multiple)
        # A row is taken from the first of the tokens that it stands for.
        assert layout.index.tolist() == [0, 1, 2, 5, 6, *[-1] * fillers]
        assert layout.position_ids.tolist() == [0, 1, 2, 2, 3, *range(fillers)]
        assert layout.places.tolist() == [0, 1, 2, 0, 1, 3, 4] and layout.sequence_rows == (5, 0)
        found = None if layout.padding is None else layout.padding.tolist()
        assert found == ([False] * 5 + [True] * 3 if fillers else None)
        taken = layout.take(torch.arange(7) * 10, -1)
        assert taken.tolist() == [0, 10, 20, 50, 60, *[-1] * fillers]
        assert sum(layout.segments.query_lens) == 5 + fillers
