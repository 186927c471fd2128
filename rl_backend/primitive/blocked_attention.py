"""Causal attention for processors without a fused kernel that skips what the mask hides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 64
_BATCHED_SCORES = 2**19
"""Scores of short sequences that one product computes: 2 MiB in float32, which the caches hold."""


def blocked_attention(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int]) -> Tensor:
    """Packed causal attention; shapes as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Each block of queries is multiplied with the keys up to its own end, which is half the work of a full square, and the
    backward pass computes the probabilities again from the saved log-sum-exp (Dao et al., 2022). Sequences of at most one
    block are computed together with those of equal length.
    """
    attended: Tensor = _BlockedAttention.apply(query, key, value, tuple(seq_lens))
    return attended


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, seq_lens: tuple[int, ...]) -> Tensor:
        order = _order_by_length(seq_lens)
        query, key, value = order.sort(query), order.sort(key), order.sort(value)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sums = []
        for block in _blocks(query, key, order.seq_lens):
            scores = block.scores(query, key)
            block.diagonal(scores).add_(block.minus_infinity)
            largest = scores.amax(-1, keepdim=True)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            block.scatter(out, torch.bmm(weights, block.keys(value)).div_(total))
            log_sums.append(total.log_().add_(largest))
        ctx.save_for_backward(query, key, value, out, *log_sums)
        ctx.order = order
        return order.restore(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        grad = ctx.order.sort(grad)
        grad_query = torch.empty_like(out)
        grad_key, grad_value = (key.new_zeros(key.shape[1], key.shape[0], key.shape[2]) for _ in range(2))
        projection = (grad * out).sum(-1, keepdim=True)
        for block, log_sum in zip(_blocks(query, key, ctx.order.seq_lens), log_sums, strict=True):
            probabilities = block.scores(query, key).sub_(log_sum)
            # Hidden scores may exceed the log-sum-exp by any amount, so they are zeroed before the exponential and after.
            block.diagonal(probabilities).mul_(block.visible)
            block.diagonal(probabilities.exp_()).mul_(block.visible)
            grad_block = block.gather(grad)
            block.add_to_keys(grad_value, torch.bmm(probabilities.transpose(1, 2), grad_block))
            grad_scores = torch.bmm(grad_block, block.keys(value).transpose(1, 2))
            grad_scores.sub_(block.gather(projection)).mul_(probabilities)
            block.scatter(grad_query, torch.bmm(grad_scores, block.keys(key)).mul_(block.scale))
            block.add_to_keys(grad_key, torch.bmm(grad_scores.transpose(1, 2), block.gather(query).mul_(block.scale)))
        restore = ctx.order.restore
        return restore(grad_query), restore(grad_key.transpose(0, 1)), restore(grad_value.transpose(0, 1)), None


class _Order(NamedTuple):
    """The order in which short sequences of equal length are neighbours, so that one product serves many of them."""

    seq_lens: tuple[int, ...]
    tokens: Tensor | None  # (T,) where each token comes from; None keeps them where they are
    places: Tensor | None  # (T,) the inverse

    def sort(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else x[self.tokens]

    def restore(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.places is None else x[self.places]


def _order_by_length(seq_lens: tuple[int, ...]) -> _Order:
    short = [length for length in seq_lens if length <= _BLOCK]
    if len(set(short)) == len(short) or list(seq_lens) == sorted(seq_lens):
        return _Order(seq_lens, None, None)
    lengths = torch.tensor(seq_lens)
    starts = lengths.cumsum(0) - lengths
    by_length = torch.argsort(lengths, stable=True)
    sorted_lengths = lengths[by_length]
    sorted_starts = sorted_lengths.cumsum(0) - sorted_lengths
    tokens = torch.arange(int(lengths.sum())) + (starts[by_length] - sorted_starts).repeat_interleave(sorted_lengths)
    return _Order(tuple(sorted_lengths.tolist()), tokens, torch.argsort(tokens))


class _Block(NamedTuple):
    """Queries ``start`` to ``stop`` of the sequence that begins at ``origin``, or of ``batch`` whole sequences from there.

    Heads that share keys are stacked.
    """

    origin: int
    start: int
    stop: int
    batch: int
    kv_heads: int
    scale: float
    masks: Tensor  # (2, _BLOCK, _BLOCK): minus_infinity and visible

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(batch * kv_heads, group * queries, keys), scaled, not masked."""
        return torch.bmm(self.gather(query).mul_(self.scale), self.keys(key).transpose(1, 2))

    def diagonal(self, scores: Tensor) -> Tensor:
        """(batch * kv_heads, group, queries, queries), a view: the part of the scores that the causal mask cuts."""
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
        """(T, kv_heads, dim) -> (batch * kv_heads, keys, dim)."""
        rows: Tensor = x[self.origin :][: self.batch * (self.stop - self.origin)].unflatten(0, (self.batch, -1))
        return rows.transpose(1, 2).flatten(0, 1)

    def add_to_keys(self, target: Tensor, x: Tensor) -> None:
        """Adds (batch * kv_heads, keys, dim) onto (kv_heads, T, dim)."""
        rows: Tensor = target[:, self.origin :][:, : self.batch * (self.stop - self.origin)].unflatten(1, (self.batch, -1))
        rows.transpose(0, 1).add_(x.unflatten(0, (self.batch, -1)))

    def gather(self, x: Tensor) -> Tensor:
        """(T, heads, dim) -> a new (batch * kv_heads, group * queries, dim)."""
        rows: Tensor = self._queries(x).permute(0, 2, 3, 1, 4)
        return rows.clone(memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1)

    def scatter(self, target: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`gather`, into ``target``."""
        rows = x.unflatten(0, (self.batch, -1)).unflatten(2, (-1, self.stop - self.start)).permute(0, 3, 1, 2, 4)
        self._queries(target).copy_(rows)

    def _queries(self, x: Tensor) -> Tensor:
        """(T, heads, dim) -> (batch, queries, kv_heads, group, dim), a view."""
        rows: Tensor = x[self.start :][: self.batch * (self.stop - self.start)].unflatten(0, (self.batch, -1))
        grouped: Tensor = rows.unflatten(2, (self.kv_heads, -1))
        return grouped


def _blocks(query: Tensor, key: Tensor, seq_lens: Sequence[int]) -> Iterator[_Block]:
    square = query.new_ones(_BLOCK, _BLOCK)
    masks = torch.stack((torch.full_like(square, -torch.inf).triu_(1), square.tril()))
    scale = query.shape[-1] ** -0.5
    origin = 0
    for length, run in groupby(seq_lens):
        remaining = len(list(run))
        most = max(1, _BATCHED_SCORES // (query.shape[1] * length * length)) if length <= _BLOCK else 1
        while remaining:
            batch = min(remaining, most)
            end = origin + length
            for start in range(origin, end, _BLOCK):
                yield _Block(origin, start, min(start + _BLOCK, end), batch, key.shape[1], scale, masks)
            origin += batch * length
            remaining -= batch
