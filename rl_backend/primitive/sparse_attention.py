"""Sparse attention of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): the indexer, which scores every key for every query,
attention to the ``top_k`` highest, and what teaches it to choose them.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.attention import Segments, attend_apart, packed_attention
from rl_backend.primitive.float32 import wide_dtype

_MOST_SCORES = 2**24
"""Products of index queries and keys that are in memory at one time: 64 MiB."""


class IndexTerms(NamedTuple):
    """What scores are made of."""

    query: Tensor  # (N, heads, dim)
    key: Tensor  # (M, dim), one for all heads
    weight: Tensor  # (N, heads) float32, of the heads' scores, their scale included

    def of(self, block: "QueryBlock") -> "IndexTerms":
        return IndexTerms(self.query[block.queries], self.key[block.keys], self.weight[block.queries])


class QueryBlock(NamedTuple):
    """Neighbouring queries of one segment, and its keys up to the last query's."""

    queries: slice  # their rows
    keys: slice | Tensor  # their rows; none twice
    visible: Tensor  # (queries, keys) bool, which are not hidden by the causal mask


def query_blocks(segments: Segments, heads: int, device: torch.device) -> Iterator[QueryBlock]:
    """All queries, in blocks whose products with their keys, of ``heads`` heads, fit into memory.

    With ``segments.tree`` keys are those of its rows, one after the other along a path.
    """
    lengths = [*zip(segments.query_lens, segments.key_lens, strict=True)]
    if device.type == "meta":
        # Nothing is computed there: one block, as large as any, has the memory of all.
        blocks = [(min(queries, _block_size(heads, keys)), keys) for queries, keys in lengths]
        lengths = [max(blocks, key=lambda block: block[0] * block[1])]
    paths = None if segments.tree is None else segments.key_index
    query_origin = key_origin = 0
    for queries, keys in lengths:
        size = _block_size(heads, keys)
        for start in range(0, queries, size):
            stop = min(start + size, queries)
            seen = keys - queries + stop
            positions = torch.arange(seen - (stop - start), seen, device=device)
            visible = torch.arange(seen, device=device) <= positions[:, None]
            rows = slice(query_origin + start, query_origin + stop)
            in_order = slice(key_origin, key_origin + seen)
            yield QueryBlock(rows, in_order if paths is None else paths[in_order], visible)
        query_origin += queries
        key_origin += keys


def _block_size(heads: int, keys: int) -> int:
    return max(1, _MOST_SCORES // (heads * keys))


def index_scores(terms: IndexTerms) -> Tensor:
    """``sum_h weight_h relu(query_h . key)`` in float32 or better; (N, M), nothing masked."""
    dtype = wide_dtype(terms.query.dtype)
    products = torch.einsum("nhd,md->nhm", terms.query.to(dtype), terms.key.to(dtype)).relu()
    return torch.einsum("nhm,nh->nm", products, terms.weight.to(dtype))


@torch.no_grad()
def choose_keys(terms: IndexTerms, segments: Segments, top_k: int) -> Tensor:
    """The keys that each query attends to: the highest scores of its segment's keys up to its own.

    Of equal scores, which are frequent, the key with the lowest number is taken: nothing that comes later counts.

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


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor) -> Tensor:
    """Softmax attention of each query to the chosen keys of its segment, scaled by ``dim ** -0.5``.

    Computed with masks, block by block of queries: what is saved is the memory of scores and not their work. The backward
    pass computes the scores of a block again.

    Args:
        query: (N, heads, dim).
        key, value: (M, kv_heads, dim) and (M, kv_heads, value_dim); ``heads`` is a multiple of ``kv_heads``.
        chosen: (N, top_k) of :func:`choose_keys`.

    Returns:
        (N, heads, value_dim)
    """
    # Segments whose keys are all chosen take packed_attention together. Which these are depends on each alone, so that a
    # segment has the same bits whatever it is packed with.
    covered = [keys <= chosen.shape[1] for keys in segments.key_lens]
    return attend_apart(_attend_to_chosen, covered, segments, query, key, value, chosen)


def _attend_to_chosen(
    covered: bool, segments: Segments, query: Tensor, key: Tensor, value: Tensor, chosen: Tensor
) -> Tensor:
    if covered:
        return packed_attention(query, key, value, segments)
    attended: Tensor = _SparseAttention.apply(query, key, value, segments, chosen)
    return attended


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    enable_gqa = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=enable_gqa)[
        0
    ].transpose(0, 1)


def _visible_and_chosen(block: QueryBlock, chosen: Tensor) -> Tensor:
    return chosen_mask(chosen[block.queries], block.visible.shape[1]) & block.visible


class _SparseAttention(torch.autograd.Function):
    """Keeps its inputs alone. With a mask SDPA keeps all scores, or the masks: a byte for each query and key."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for block in query_blocks(segments, query.shape[1], query.device):
            mask = _visible_and_chosen(block, chosen)
            if query.is_meta:
                # What a block needs: a plan of memory counts it.
                query.new_empty(mask.numel() * query.shape[1])
                continue
            out[block.queries] = _attend(query[block.queries], key[block.keys], value[block.keys], mask)
        ctx.save_for_backward(query, key, value, chosen)
        ctx.segments = segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, chosen = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Many blocks add to the gradient of a key.
        wide = wide_dtype(query.dtype)
        grad_key, grad_value = (torch.zeros_like(each, dtype=wide) for each in (key, value))
        for block in query_blocks(ctx.segments, query.shape[1], query.device):
            mask = _visible_and_chosen(block, chosen)
            if query.is_meta:
                query.new_empty(2 * mask.numel() * query.shape[1])
                continue
            parts = query[block.queries], key[block.keys], value[block.keys]
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in parts]
                attended = _attend(leaves[0], leaves[1], leaves[2], mask)
            of_query, of_key, of_value = torch.autograd.grad(attended, leaves, grad[block.queries])
            grad_query[block.queries] = of_query
            grad_key[block.keys] += of_key
            grad_value[block.keys] += of_value
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def indexer_loss(
    terms: IndexTerms,
    query: Tensor,
    key: Tensor,
    segments: Segments,
    chosen: Tensor | None,
    scale: float,
    *,
    counts: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """``sum over queries of KL(p || softmax(scores))``; 0-d, differentiable in ``terms`` alone.

    p is what the queries attend to, added up over the heads and divided by its sum. Both are over all keys that a query
    sees (the paper's warm-up, equation 3), or over those that are chosen (its equation 4).

    Args:
        query, key: of the attention, (N, heads, dim) and (M, kv_heads, dim); no gradient goes there.
        chosen: (N, top_k); None for all keys.
        scale: of the attention's scores.
        counts: (N,), how often each query counts; None for once.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other heads.
    """
    loss: Tensor = _IndexerLoss.apply(*terms, query, key, segments, chosen, scale, counts, sum_over_ranks)
    return loss


class _IndexerLoss(torch.autograd.Function):
    """Gradients are computed with the value, block by block: of a block's scores nothing is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        index_query: Tensor,
        index_key: Tensor,
        weight: Tensor,
        query: Tensor,
        key: Tensor,
        segments: Segments,
        chosen: Tensor | None,
        scale: float,
        counts: Tensor | None,
        sum_over_ranks: Callable[[Tensor], object] | None,
    ) -> Tensor:
        terms = IndexTerms(index_query, index_key, weight)
        wide = wide_dtype(index_query.dtype)
        gradients = IndexTerms(*(torch.zeros_like(each, dtype=wide) for each in terms))
        total = weight.new_zeros(())
        for block in query_blocks(segments, max(index_query.shape[1], query.shape[1]), query.device):
            mask = block.visible if chosen is None else _visible_and_chosen(block, chosen)
            target = _attended(query[block.queries], key[block.keys], mask, scale)
            if sum_over_ranks is not None:
                sum_over_ranks(target)
            target /= target.sum(-1, keepdim=True)
            with torch.enable_grad():
                leaves = IndexTerms(*(each.detach().requires_grad_() for each in terms.of(block)))
                logits = index_scores(leaves).masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
                divergences = torch.xlogy(target, target) - target * logits
                if counts is not None:
                    divergences = divergences * counts[block.queries, None]
                divergence = divergences.sum()
            _add(gradients, block, torch.autograd.grad(divergence, leaves))
            total += divergence.detach()
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [each.dtype for each in terms]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((gradient * grad).to(dtype) for gradient, dtype in found), *(None,) * 7


def _attended(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    dtype = wide_dtype(query.dtype)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query.to(dtype), key.to(dtype)) * scale
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).sum(0)


def _add(gradients: IndexTerms, block: QueryBlock, found: tuple[Tensor, ...]) -> None:
    query, key, weight = found
    gradients.query[block.queries] += query
    gradients.key[block.keys] += key
    gradients.weight[block.queries] += weight
