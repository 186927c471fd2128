"""The indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): which of the keys before it each query attends to.

It scores every key for every query, cheaply, and the ``top_k`` with the highest scores are attended to.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rl_backend.primitive.attention import Segments

_MOST_SCORES = 2**24
"""Products of index queries and keys that are in memory at one time: 64 MiB."""


class IndexTerms(NamedTuple):
    """What scores are made of.

    Attributes:
        query: (N, heads, dim).
        key: (M, dim), one for all heads.
        weight: (N, heads) float32, of the heads' scores, their scale included.
    """

    query: Tensor
    key: Tensor
    weight: Tensor

    def of(self, block: "QueryBlock") -> "IndexTerms":
        return IndexTerms(self.query[block.queries], self.key[block.keys], self.weight[block.queries])


class QueryBlock(NamedTuple):
    """Neighbouring queries of one segment, and its keys up to the last query's.

    Attributes:
        queries, keys: their rows.
        visible: (queries, keys) bool, which are not hidden by the causal mask.
    """

    queries: slice
    keys: slice
    visible: Tensor


def query_blocks(segments: Segments, heads: int, device: torch.device) -> Iterator[QueryBlock]:
    """All queries, in blocks whose products with their keys, of ``heads`` heads, fit into memory.

    On the meta device, where nothing is computed, one block, as large as any.
    """
    lengths = [*zip(segments.query_lens, segments.key_lens, strict=True)]
    if device.type == "meta":
        blocks = [(min(queries, _block_size(heads, keys)), keys) for queries, keys in lengths]
        lengths = [max(blocks, key=lambda block: block[0] * block[1])]
    query_origin = key_origin = 0
    for queries, keys in lengths:
        size = _block_size(heads, keys)
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            seen = keys - queries + stop
            positions = torch.arange(seen - (stop - start), seen, device=device)
            visible = torch.arange(seen, device=device) <= positions[:, None]
            rows = slice(query_origin + start, query_origin + stop)
            yield QueryBlock(rows, slice(key_origin, key_origin + seen), visible)
        query_origin += queries
        key_origin += keys


def _block_size(heads: int, keys: int) -> int:
    return max(1, _MOST_SCORES // (heads * keys))


def index_scores(terms: IndexTerms) -> Tensor:
    """``sum_h weight_h relu(query_h . key)`` in float32 or better; (N, M), nothing masked."""
    dtype = torch.promote_types(terms.query.dtype, torch.float32)
    products = torch.einsum("nhd,md->nhm", terms.query.to(dtype), terms.key.to(dtype)).relu()
    return torch.einsum("nhm,nh->nm", products, terms.weight.to(dtype))


@torch.no_grad()
def choose_keys(terms: IndexTerms, segments: Segments, top_k: int) -> Tensor:
    """The keys that each query attends to: the highest scores of its segment's keys up to its own.

    Scores are often equal, 0 above all, and of equal scores the key with the lowest number is taken: the choice depends on
    nothing that comes later.

    Returns:
        (N, top_k) int32, ascending numbers of keys within their segment; -1 behind the last where fewer can be seen.
    """
    tokens = terms.query.shape[0]
    chosen = torch.full((tokens, top_k), -1, dtype=torch.int32, device=terms.query.device)
    if terms.query.is_meta:
        return chosen
    for block in query_blocks(segments, terms.query.shape[1], terms.query.device):
        taken = block.visible
        if taken.shape[1] > top_k:
            taken = highest(index_scores(terms.of(block)).masked_fill(~block.visible, -torch.inf), top_k) & block.visible
        chosen[block.queries] = _numbers(taken, top_k)
    return chosen


def highest(scores: Tensor, top_k: int) -> Tensor:
    """Which of (N, M) scores are the ``top_k`` highest of their row, of equal ones those with the lowest numbers; bool."""
    edge = scores.topk(top_k, dim=-1).values[:, -1:]
    above, at_edge = scores > edge, scores == edge
    room = top_k - above.sum(-1, keepdim=True)
    return above | (at_edge & (at_edge.cumsum(-1) <= room))


def _numbers(taken: Tensor, top_k: int) -> Tensor:
    """(N, M) bool, of which at most ``top_k`` in a row -> (N, top_k) ascending numbers, -1 behind them."""
    places = torch.where(taken, taken.cumsum(-1) - 1, top_k)
    numbers = torch.arange(taken.shape[1], device=taken.device, dtype=torch.int32).expand_as(taken)
    # One more column takes what is left out.
    rows = torch.full((taken.shape[0], top_k + 1), -1, dtype=torch.int32, device=taken.device)
    return rows.scatter_(1, places, numbers)[:, :top_k]


def chosen_mask(chosen: Tensor, num_keys: int) -> Tensor:
    """(N, top_k) of :func:`choose_keys` -> (N, num_keys) bool."""
    places = torch.where(chosen < 0, num_keys, chosen).long()
    mask = torch.zeros(chosen.shape[0], num_keys + 1, dtype=torch.bool, device=chosen.device)
    return mask.scatter_(1, places, True)[:, :num_keys]
