"""Attention to chosen keys, and what teaches an indexer to choose them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.attention import Segments
from rl_backend.primitive.indexer import IndexTerms, QueryBlock, chosen_mask, index_scores, query_blocks


def covers_all(segments: Segments, top_k: int) -> bool:
    """Whether ``top_k`` keys are all that any query sees, so that sparse attention is dense."""
    return max(segments.key_lens) <= top_k


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, chosen: Tensor, scale: float) -> Tensor:
    """Softmax attention of each query to the chosen keys of its segment.

    Computed with masks, block by block of queries: what is saved is the memory of scores and not their work.

    Args:
        query: (N, heads, dim).
        key, value: (M, kv_heads, dim) and (M, kv_heads, value_dim); ``heads`` is a multiple of ``kv_heads``.
        chosen: (N, top_k) of :func:`~rl_backend.primitive.indexer.choose_keys`; at least one key in a row.
        scale: factor of the scores.

    Returns:
        (N, heads, value_dim)
    """
    heads, outputs = query.shape[1], []
    for block in query_blocks(segments, heads, query.device):
        attended = F.scaled_dot_product_attention(
            query[block.queries].transpose(0, 1)[None],
            key[block.keys].transpose(0, 1)[None],
            value[block.keys].transpose(0, 1)[None],
            attn_mask=chosen_mask(chosen[block.queries], block.visible.shape[1]) & block.visible,
            scale=scale,
            enable_gqa=key.shape[1] != heads,
        )
        outputs.append(attended[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
            mask = block.visible
            if chosen is not None:
                mask = mask & chosen_mask(chosen[block.queries], mask.shape[1])
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
