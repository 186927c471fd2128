"""Blocks of queries, highest scores, and attention to chosen keys with groups of heads and rounded numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.primitive import sparse_attention as module
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.sparse_attention import (
    IndexTerms,
    choose_keys,
    chosen_mask,
    highest,
    index_scores,
    indexer_loss,
    query_blocks,
    sparse_attention,
)

QUERIES, KEYS = (2, 5, 1, 4), (3, 9, 1, 4)


def segments() -> Segments:
    queries, keys = (torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (QUERIES, KEYS))
    return Segments(QUERIES, KEYS, queries, keys)


@pytest.mark.parametrize("most", [1, 30, 40, 2**24])
def test_blocks_are_neighbouring_queries_with_the_keys_up_to_the_last(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", most)
    heads, seen = 2, list[tuple[int, int]]()
    first_query = first_key = 0
    origins = []
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        origins += [(first_key, keys - queries + place) for place in range(queries)]
        first_query, first_key = first_query + queries, first_key + keys
    for block in query_blocks(segments(), heads, torch.device("cpu")):
        count = block.queries.stop - block.queries.start
        assert block.visible.shape == (count, block.keys.stop - block.keys.start)
        for row, query in enumerate(range(block.queries.start, block.queries.stop)):
            origin, position = origins[query]
            assert block.keys.start == origin
            assert block.visible[row].tolist() == [key <= position for key in range(block.visible.shape[1])]
        assert bool(block.visible[-1].all()), "keys end with the last query's"
        seen.append((block.queries.start, block.queries.stop))
    assert [row for start, stop in seen for row in range(start, stop)] == list(range(sum(QUERIES)))
    sizes = [max(1, most // (heads * keys)) for keys in KEYS]
    assert len(seen) == sum(-(-queries // size) for queries, size in zip(QUERIES, sizes, strict=True))


def test_a_plan_has_one_block_as_large_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", 2 * 9 * 3)
    (block,) = query_blocks(segments(), 2, torch.device("meta"))
    assert block.visible.shape == (3, 9)


def test_the_highest_scores_and_of_equal_ones_the_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [5.0, 1.0, 4.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for top_k, expected in (
        (1, [[1], [0], [0]]),
        (2, [[1, 2], [0, 2], [0, 1]]),
        (4, [[0, 1, 2, 3], [0, 2, 3, 4], [0, 1, 2, 3]]),
        (5, [[0, 1, 2, 3, 4]] * 3),
    ):
        assert [row.nonzero().flatten().tolist() for row in highest(scores, top_k)] == expected


def test_choices_are_ascending_numbers_within_the_segment_and_minus_one_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = IndexTerms(
        torch.randn(sum(QUERIES), 2, 3, generator=generator),
        torch.randn(sum(KEYS), 3, generator=generator),
        torch.randn(sum(QUERIES), 2, generator=generator, requires_grad=True),
    )
    chosen = choose_keys(terms, segments(), 3)
    assert chosen.dtype == torch.int32 and chosen.shape == (sum(QUERIES), 3) and not chosen.requires_grad
    whole = index_scores(terms)
    first_query = first_key = 0
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        for place in range(queries):
            row, position = first_query + place, keys - queries + place
            scores = whole[row, first_key : first_key + position + 1]
            expected = sorted(scores.topk(min(3, position + 1)).indices.tolist())
            assert chosen[row].tolist() == expected + [-1] * (3 - len(expected))
            assert chosen_mask(chosen[row : row + 1], keys)[0].nonzero().flatten().tolist() == expected
        first_query, first_key = first_query + queries, first_key + keys
    assert choose_keys(IndexTerms(*(each.to("meta") for each in terms)), segments(), 3).shape == (sum(QUERIES), 3)


def test_scores_are_weighted_sums_of_what_is_above_0() -> None:
    terms = IndexTerms(torch.tensor([[[1.0], [-2.0]]]), torch.tensor([[3.0], [-1.0]]), torch.tensor([[0.5, -4.0]]))
    assert index_scores(terms).tolist() == [[1.5, -8.0]]


def by_definition(query: Tensor, key: Tensor, value: Tensor, chosen: Tensor) -> Tensor:
    """Each query with its own keys alone."""
    outputs, first_query, first_key = [], 0, 0
    group = query.shape[1] // key.shape[1]
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        for row in range(first_query, first_query + queries):
            places = first_key + chosen[row][chosen[row] >= 0].long()
            k, v = (each[places].repeat_interleave(group, 1) for each in (key, value))
            shares = (torch.einsum("hd,khd->hk", query[row], k) * query.shape[-1] ** -0.5).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", shares, v))
        first_query, first_key = first_query + queries, first_key + keys
    return torch.stack(outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("most", [40, 2**24])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_to_chosen_keys_with_groups_of_heads(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, most: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(module, "_MOST_SCORES", most)
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(QUERIES), 4, 6), (sum(KEYS), kv_heads, 6), (sum(KEYS), kv_heads, 5)
    leaves: Any = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    for top_k in (1, 3, 4, 9):
        terms = IndexTerms(
            torch.randn(sum(QUERIES), 2, 3, generator=generator),
            torch.randn(sum(KEYS), 3, generator=generator),
            torch.randn(sum(QUERIES), 2, generator=generator),
        )
        chosen = choose_keys(terms, segments(), top_k)
        found = sparse_attention(leaves[0], leaves[1], leaves[2], segments(), chosen)
        wide: Any = [leaf.double() for leaf in leaves]
        expected = by_definition(wide[0], wide[1], wide[2], chosen)
        mix = torch.randn(expected.shape, generator=generator).to(dtype)
        gradients = torch.autograd.grad((found * mix).sum(), leaves)
        right = torch.autograd.grad((expected * mix.double()).sum(), leaves)
        assert found.dtype == dtype and [each.dtype for each in gradients] == [dtype] * 3
        for mine, other in zip((found, *gradients), (expected, *right), strict=True):
            scale = max(1.0, float(other.detach().abs().max()))
            torch.testing.assert_close(mine.double(), other.double(), atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_of_rounded_terms_and_fewer_heads_of_keys_is_that_of_wide_ones(dense: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn: Any = [
        torch.randn(shape, generator=generator) for shape in ((sum(QUERIES), 2, 3), (sum(KEYS), 3), (sum(QUERIES), 2))
    ]
    terms = IndexTerms(drawn[0].bfloat16(), drawn[1].bfloat16(), drawn[2])
    query, key = torch.randn(sum(QUERIES), 4, 6, generator=generator), torch.randn(sum(KEYS), 2, 6, generator=generator)
    chosen = None if dense else choose_keys(terms, segments(), 2)
    losses, gradients = [], []
    for each, k in (
        (terms, key),
        (IndexTerms(*(term.float() for term in terms)), key.repeat_interleave(2, 1)),
    ):
        leaves = IndexTerms(*(term.clone().requires_grad_() for term in each))
        loss = indexer_loss(leaves, query, k, segments(), chosen, 0.4)
        gradients.append(torch.autograd.grad(3.0 * loss, leaves))
        losses.append(loss)
        once = torch.autograd.grad(indexer_loss(leaves, query, k, segments(), chosen, 0.4), leaves)
        torch.testing.assert_close([3.0 * one for one in once], list(gradients[-1]), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(losses[0], losses[1])
    assert [each.dtype for each in gradients[0]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    torch.testing.assert_close([each.float() for each in gradients[0]], list(gradients[1]), atol=1e-2, rtol=1e-2)
