"""Causal attention for processors without a fused kernel that skips what the mask hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 64


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int]) -> Tensor:
    """Packed causal attention; shapes as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Each block of queries is multiplied with the keys up to its own end, which is half the work of a full square, and the
    backward pass computes the probabilities again from the saved log-sum-exp (Dao et al., 2022).
    """
    attended: Tensor = _BlockedAttention.apply(query, key, value, tuple(seq_lens))
    return attended


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seq_lens: tuple[int, ...]) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sums = []
        for block in _blocks(query, key, seq_lens):
            scores = block.scores(query, key)
            block.diagonal(scores).add_(block.minus_infinity)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            block.scatter(out, torch.bmm(weights, block.keys(value)).div_(total))
            log_sums.append(total.log_().add_(largest))
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.seq_lens = seq_lens
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        grad_query = torch.empty_like(out)
        grad_key, grad_value = (key.new_zeros(key.shape[1], key.shape[0], key.shape[2]) for _ in range(2))
        projection = (grad * out).sum(-1, keepdim=True)
        for block, log_sum in zip(_blocks(query, key, ctx.seq_lens), log_sums, strict=True):
            probabilities = block.scores(query, key).sub_(log_sum)
            # Hidden scores may exceed the log-sum-exp by any amount, so they are zeroed before the exponential and after.
            block.diagonal(probabilities).mul_(block.visible)
            block.diagonal(probabilities.exp_()).mul_(block.visible)
            grad_block = block.gather(grad)
            block.key_rows(grad_value).add_(torch.bmm(probabilities.transpose(1, 2), grad_block))
            grad_scores = torch.bmm(grad_block, block.keys(value).transpose(1, 2))
            grad_scores.sub_(block.gather(projection)).mul_(probabilities)
            block.scatter(grad_query, torch.bmm(grad_scores, block.keys(key)).mul_(block.scale))
            block.key_rows(grad_key).add_(torch.bmm(grad_scores.transpose(1, 2), block.gather(query).mul_(block.scale)))
        return grad_query, grad_key.transpose(0, 1).contiguous(), grad_value.transpose(0, 1).contiguous(), None


class _Block(NamedTuple):
    """Queries ``start`` to ``stop`` of the sequence that begins at ``origin``. Heads that share keys are stacked."""

    origin: int
    start: int
    stop: int
    kv_heads: int
    scale: float
    masks: Tensor  # (2, _BLOCK, _BLOCK): minus_infinity and visible

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(kv_heads, group * queries, keys), scaled, not masked."""
        return torch.bmm(self.gather(query).mul_(self.scale), self.keys(key).transpose(1, 2))

    def diagonal(self, scores: Tensor) -> Tensor:
        """(kv_heads, group, queries, queries), a view: the part of the scores that the causal mask cuts."""
        stacked: Tensor = scores.unflatten(1, (-1, self.stop - self.start))
        return stacked[..., self.start - self.origin :]

    @property
    def minus_infinity(self) -> Tensor:
        """(queries, queries): what to add to hide what is above the diagonal."""
        return self.masks[0, : self.stop - self.start, : self.stop - self.start]

    @property
    def visible(self) -> Tensor:
        """(queries, queries): 1 up to the diagonal and 0 above."""
        return self.masks[1, : self.stop - self.start, : self.stop - self.start]

    def keys(self, x: Tensor) -> Tensor:
        """(T, kv_heads, dim) -> (kv_heads, keys, dim), a view."""
        return x[self.origin : self.stop].transpose(0, 1)

    def key_rows(self, x: Tensor) -> Tensor:
        """(kv_heads, T, dim) -> (kv_heads, keys, dim), a view."""
        return x[:, self.origin : self.stop]

    def gather(self, x: Tensor) -> Tensor:
        """(T, heads, dim) -> a new (kv_heads, group * queries, dim)."""
        rows: Tensor = x[self.start : self.stop].unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)
        return rows.clone(memory_format=torch.contiguous_format).flatten(1, 2)

    def scatter(self, target: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`gather`, into ``target``."""
        rows = x.unflatten(1, (-1, self.stop - self.start)).permute(2, 0, 1, 3)
        target[self.start : self.stop].unflatten(1, (self.kv_heads, -1)).copy_(rows)


def _blocks(query: Tensor, key: Tensor, seq_lens: Sequence[int]) -> Iterator[_Block]:
    square = query.new_ones(_BLOCK, _BLOCK)
    masks = torch.stack((torch.full_like(square, -torch.inf).triu_(1), square.tril()))
    scale = query.shape[-1] ** -0.5
    origin = 0
    for length in seq_lens:
        end = origin + length
        for start in range(origin, end, _BLOCK):
            yield _Block(origin, start, min(start + _BLOCK, end), key.shape[1], scale, masks)
        origin = end
