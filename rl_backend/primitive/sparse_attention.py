"""Attention to chosen keys, and what teaches an indexer to choose them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.indexer import IndexTerms, QueryBlock, chosen_mask, index_scores, query_blocks


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor) -> Tensor:
    """Softmax attention of each query to the chosen keys of its segment, scaled by ``dim ** -0.5``.

    Segments whose keys are all chosen are attended to together, as
    :func:`~rl_backend.primitive.attention.packed_attention` does. Which ones these are depends on each alone, so that what
    a segment attends to has the same bits whatever it is packed with.

    The others are computed with masks, block by block of queries: what is saved is the memory of scores and not their work.
    The backward pass computes the scores of a block again.

    Args:
        query: (N, heads, dim).
        key, value: (M, kv_heads, dim) and (M, kv_heads, value_dim); ``heads`` is a multiple of ``kv_heads``.
        chosen: (N, top_k) of :func:`~rl_backend.primitive.indexer.choose_keys`; the smaller of ``top_k`` and the keys that a
            query sees in a row.

    Returns:
        (N, heads, value_dim)
    """
    covered = [keys <= chosen.shape[1] for keys in segments.key_lens]
    if all(covered):
        return packed_attention(query, key, value, segments)
    if not any(covered):
        return _masked(query, key, value, segments, chosen)
    query_lens, key_lens = list(segments.query_lens), list(segments.key_lens)
    rows = query.split(query_lens), key.split(key_lens), value.split(key_lens), chosen.split(query_lens)
    attended = [query] * len(covered)
    for dense in (True, False):
        indices = [index for index, each in enumerate(covered) if each is dense]
        part = _part(segments, indices)
        q, k, v, numbers = (torch.cat([each[index] for index in indices]) for each in rows)
        out = packed_attention(q, k, v, part) if dense else _masked(q, k, v, part, numbers)
        for index, row in zip(indices, out.split(part.query_lens), strict=True):
            attended[index] = row
    return torch.cat(attended)


def _masked(query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor) -> Tensor:
    attended: Tensor = _SparseAttention.apply(query, key, value, segments, chosen)
    return attended


def _part(segments: Segments, indices: list[int]) -> Segments:
    """Some of the segments, whose keys are rows of their own; made on the device, so that nothing waits for it."""
    starts = []
    for boundaries in (segments.cu_queries, segments.cu_keys):
        lengths = boundaries.diff()
        chosen = torch.cat([lengths[index : index + 1] for index in indices])
        starts.append(F.pad(chosen.cumsum(0, dtype=boundaries.dtype), (1, 0)))
    query_lens, key_lens = (tuple(each[index] for index in indices) for each in segments[:2])
    return Segments(query_lens, key_lens, *starts)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """(n, heads, dim), (m, kv_heads, dim) and (m, kv_heads, value_dim) of a block -> (n, heads, value_dim)."""
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    enable_gqa = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=enable_gqa)[
        0
    ].transpose(0, 1)


def _visible_and_chosen(block: QueryBlock, chosen: Tensor) -> Tensor:
    return chosen_mask(chosen[block.queries], block.visible.shape[1]) & block.visible


class _SparseAttention(torch.autograd.Function):
    """Keeps its inputs alone. With a mask SDPA keeps all scores, or the masks: a byte for each query and key.

    On the meta device it takes what a block needs: its scores, and in the backward pass their gradients too.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        for block in query_blocks(segments, query.shape[1], query.device):
            mask = _visible_and_chosen(block, chosen)
            if query.is_meta:
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
        wide = torch.promote_types(query.dtype, torch.float32)
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
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """``sum over queries of KL(p || softmax(scores))``; 0-d, differentiable in ``terms`` alone.

    p is what the queries attend to, added up over the heads and divided by its sum. Both distributions are over all keys
    that a query sees (the paper's warm-up, equation 3), or over those that are chosen (its equation 4).

    Args:
        query, key: of the attention, (N, heads, dim) and (M, kv_heads, dim); no gradient goes there.
        chosen: (N, top_k); None for all keys.
        scale: of the attention's scores.
        padding: (N,) bool, queries that do not count.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other heads.
    """
    loss: Tensor = _IndexerLoss.apply(*terms, query, key, segments, chosen, scale, padding, sum_over_ranks)
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
        padding: Tensor | None,
        sum_over_ranks: Callable[[Tensor], object] | None,
    ) -> Tensor:
        terms = IndexTerms(index_query, index_key, weight)
        wide = torch.promote_types(index_query.dtype, torch.float32)
        gradients = IndexTerms(*(torch.zeros_like(each, dtype=wide) for each in terms))
        total = weight.new_zeros(())
        for block in query_blocks(segments, max(index_query.shape[1], query.shape[1]), query.device):
            mask = block.visible if chosen is None else _visible_and_chosen(block, chosen)
            target = _attended(query[block.queries], key[block.keys], mask, scale)
            if sum_over_ranks is not None:
                sum_over_ranks(target)
            target /= target.sum(-1, keepdim=True)
            if padding is not None:
                target = target.masked_fill(padding[block.queries, None], 0.0)
            with torch.enable_grad():
                leaves = IndexTerms(*(each.detach().requires_grad_() for each in terms.of(block)))
                logits = index_scores(leaves).masked_fill(~mask, -torch.inf).log_softmax(-1).masked_fill(~mask, 0.0)
                divergence = (torch.xlogy(target, target) - target * logits).sum()
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
    """Attention of (n, heads, dim) to (m, kv_heads, dim), summed over the heads; (n, m) in float32 or better."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("nhd,mhd->hnm", query.to(dtype), key.to(dtype)) * scale
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).sum(0)


def _add(gradients: IndexTerms, block: QueryBlock, found: tuple[Tensor, ...]) -> None:
    query, key, weight = found
    gradients.query[block.queries] += query
    gradients.key[block.keys] += key
    gradients.weight[block.queries] += weight
