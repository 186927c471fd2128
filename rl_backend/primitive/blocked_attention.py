"""Causal attention for processors without a fused kernel that skips what the mask hides."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 64
_BATCHED_SCORES = 2**19
"""Scores of several sequences that one product computes: 2 MiB in float32, which the caches hold."""


def blocked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    sinks: Tensor | None = None,
) -> Tensor:
    """Packed causal attention; arguments as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Each block of queries is multiplied with the keys up to its own end, which is half the work of a full square, and the
    backward pass computes the probabilities again from the saved log-sum-exp (Dao et al., 2022). Neighbouring segments of
    equal lengths are computed together, and those of at most one block of queries are made neighbours.
    """
    attended: Tensor = _BlockedAttention.apply(query, key, value, tuple(query_lens), tuple(key_lens), sinks)
    return attended


class _BlockedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_lens: tuple[int, ...],
        key_lens: tuple[int, ...],
        sinks: Tensor | None,
    ) -> Tensor:
        order = _order_by_length(query_lens, key_lens)
        query, key, value = order.queries.sort(query), order.keys.sort(key), order.keys.sort(value)
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        log_sums = []
        for block in _blocks(query, key, order.segments):
            scores = block.scores(query, key)
            block.diagonal(scores).add_(block.minus_infinity)
            largest = scores.amax(-1, keepdim=True)
            if sinks is not None:
                sink = block.gather(_of_rows(sinks, query))
                largest = torch.maximum(largest, sink)
            weights = scores.sub_(largest).exp_()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += (sink - largest).exp_()
            block.scatter(out, torch.bmm(weights, block.keys(value)).div_(total))
            log_sums.append(total.log_().add_(largest))
        ctx.save_for_backward(query, key, value, out, sinks, *log_sums)
        ctx.order = order
        return order.queries.restore(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor | None]:
        query, key, value, out, sinks, *log_sums = ctx.saved_tensors
        grad = ctx.order.queries.sort(grad)
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        grad_key, grad_value = (x.new_zeros(x.shape[1], x.shape[0], x.shape[2]) for x in (key, value))
        projection = (grad * out).sum(-1, keepdim=True)
        grad_of_sinks = torch.empty_like(projection)
        for block, log_sum in zip(_blocks(query, key, ctx.order.segments), log_sums, strict=True):
            probabilities = block.scores(query, key).sub_(log_sum)
            # Hidden scores may exceed the log-sum-exp by any amount, so they are zeroed before the exponential and after.
            block.diagonal(probabilities).mul_(block.visible)
            block.diagonal(probabilities.exp_()).mul_(block.visible)
            grad_block = block.gather(grad)
            block.add_to_keys(grad_value, torch.bmm(probabilities.transpose(1, 2), grad_block))
            grad_scores = torch.bmm(grad_block, block.keys(value).transpose(1, 2))
            projected = block.gather(projection)
            grad_scores.sub_(projected).mul_(probabilities)
            block.scatter(grad_query, torch.bmm(grad_scores, block.keys(key)).mul_(block.scale))
            block.add_to_keys(grad_key, torch.bmm(grad_scores.transpose(1, 2), block.gather(query).mul_(block.scale)))
            if sinks is not None:
                # As of a score whose value is 0.
                of_sink = block.gather(_of_rows(sinks, query)).sub_(log_sum).exp_()
                block.scatter(grad_of_sinks, of_sink.mul_(projected).neg_())
        grad_key, grad_value = (ctx.order.keys.restore(x.transpose(0, 1)) for x in (grad_key, grad_value))
        grad_sinks = None if sinks is None else grad_of_sinks.sum((0, 2))
        return ctx.order.queries.restore(grad_query), grad_key, grad_value, None, None, grad_sinks


def _of_rows(sinks: Tensor, query: Tensor) -> Tensor:
    """(heads,) -> (T, heads, 1), a view."""
    return sinks[None, :, None].expand(query.shape[0], -1, 1)


class _Rows(NamedTuple):
    tokens: Tensor | None = None  # (T,) where each row comes from; None keeps them where they are
    places: Tensor | None = None  # (T,) the inverse

    def sort(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else x[self.tokens]

    def restore(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.places is None else x[self.places]


class _Order(NamedTuple):
    """The order in which short segments of equal lengths are neighbours, so that one product serves many of them."""

    segments: list[tuple[int, int]]  # queries and keys
    queries: _Rows
    keys: _Rows


def _order_by_length(query_lens: tuple[int, ...], key_lens: tuple[int, ...]) -> _Order:
    segments = list(zip(query_lens, key_lens, strict=True))
    short = [segment for segment in segments if segment[0] <= _BLOCK]
    if len(set(short)) == len(short) or segments == sorted(segments):
        return _Order(segments, _Rows(), _Rows())
    by_length = sorted(range(len(segments)), key=segments.__getitem__)
    queries = _rows_in_order(query_lens, by_length)
    keys = queries if key_lens == query_lens else _rows_in_order(key_lens, by_length)
    return _Order([segments[index] for index in by_length], queries, keys)


def _rows_in_order(lens: tuple[int, ...], order: list[int]) -> _Rows:
    lengths = torch.tensor(lens)
    starts = lengths.cumsum(0) - lengths
    sorted_lengths = lengths[order]
    sorted_starts = sorted_lengths.cumsum(0) - sorted_lengths
    tokens = torch.arange(sum(lens)) + (starts[order] - sorted_starts).repeat_interleave(sorted_lengths)
    return _Rows(tokens, torch.argsort(tokens))


class _Block(NamedTuple):
    """Neighbouring queries of ``batch`` neighbouring segments of equal lengths, with the keys up to the last query's.

    Heads that share keys are stacked.
    """

    first_query: int  # of the segments, as are first_key and the two lengths of a segment
    first_key: int
    segment: tuple[int, int]
    start: int  # within each segment, of the queries of the block
    num_queries: int
    num_keys: int
    batch: int
    kv_heads: int
    scale: float
    minus_infinity: Tensor  # (queries, queries): what to add to hide what is above the diagonal
    visible: Tensor  # (queries, queries): 1 up to the diagonal and 0 above

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """(batch * kv_heads, group * queries, keys), scaled, not masked."""
        return torch.bmm(self.gather(query).mul_(self.scale), self.keys(key).transpose(1, 2))

    def diagonal(self, scores: Tensor) -> Tensor:
        """(batch * kv_heads, group, queries, queries), a view: the part of the scores that the causal mask cuts."""
        stacked: Tensor = scores.unflatten(1, (-1, self.num_queries))
        return stacked[..., self.num_keys - self.num_queries :]

    def keys(self, x: Tensor) -> Tensor:
        """(T, kv_heads, dim) -> (batch * kv_heads, keys, dim)."""
        rows: Tensor = x[self.first_key :][: self.batch * self.segment[1]].unflatten(0, (self.batch, -1))
        return rows[:, : self.num_keys].transpose(1, 2).flatten(0, 1)

    def add_to_keys(self, target: Tensor, x: Tensor) -> None:
        """Adds (batch * kv_heads, keys, dim) onto (kv_heads, T, dim)."""
        rows: Tensor = target[:, self.first_key :][:, : self.batch * self.segment[1]].unflatten(1, (self.batch, -1))
        rows[:, :, : self.num_keys].transpose(0, 1).add_(x.unflatten(0, (self.batch, -1)))

    def gather(self, x: Tensor) -> Tensor:
        """(T, heads, dim) -> a new (batch * kv_heads, group * queries, dim)."""
        rows: Tensor = self._queries(x).permute(0, 2, 3, 1, 4)
        return rows.clone(memory_format=torch.contiguous_format).flatten(2, 3).flatten(0, 1)

    def scatter(self, target: Tensor, x: Tensor) -> None:
        """The inverse of :meth:`gather`, into ``target``."""
        rows = x.unflatten(0, (self.batch, -1)).unflatten(2, (-1, self.num_queries)).permute(0, 3, 1, 2, 4)
        self._queries(target).copy_(rows)

    def _queries(self, x: Tensor) -> Tensor:
        """(T, heads, dim) -> (batch, queries, kv_heads, group, dim), a view."""
        rows: Tensor = x[self.first_query :][: self.batch * self.segment[0]].unflatten(0, (self.batch, -1))
        grouped: Tensor = rows[:, self.start :][:, : self.num_queries].unflatten(2, (self.kv_heads, -1))
        return grouped


def _blocks(query: Tensor, key: Tensor, segments: Sequence[tuple[int, int]]) -> Iterator[_Block]:
    square = query.new_ones(_BLOCK, _BLOCK)
    masks = torch.stack((torch.full_like(square, -torch.inf).triu_(1), square.tril()))
    scale = query.shape[-1] ** -0.5
    # A library may split a product with fewer matrices than threads along the keys: the bits of a segment alone would then
    # not be those beside others. As many matrices as threads, or more, get a thread each either way.
    few = key.shape[1] < torch.get_num_threads()
    first_query = first_key = 0
    for (queries, keys), run in groupby(segments):
        count = len(list(run))
        for start in range(0, queries, _BLOCK):
            num_queries = min(_BLOCK, queries - start)
            num_keys = keys - queries + start + num_queries
            cut = masks[:, :num_queries, :num_queries].unbind()
            most = 1 if few and queries > _BLOCK else max(1, _BATCHED_SCORES // (query.shape[1] * num_queries * num_keys))
            for first in range(0, count, most):
                at = first_query + first * queries, first_key + first * keys
                sizes = num_queries, num_keys, min(most, count - first)
                yield _Block(*at, (queries, keys), start, *sizes, key.shape[1], scale, *cut)
        first_query += count * queries
        first_key += count * keys
