"""Causal attention over packed sequences on a CPU, by the flash kernel that torch has for it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.prefix_tree import PrefixTree

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    sinks: Tensor | None = None,
    tree: PrefixTree | None = None,
) -> Tensor:
    """Packed causal attention; arguments as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Queries attend to their own keys and to earlier ones apart, which are merged as in the cascades of FlashInfer (arXiv
    2501.01005). Neighbouring segments of equal lengths are computed together. In float32 and float64 what a segment attends
    to has the same bits alone, beside others and with any number of threads.

    Args:
        tree: whose runs the segments are; keys are then those of its rows, and both lengths its runs'. The queries of all
            that continue a run attend to its keys together.
    """
    attended: Tensor = _CpuAttention.apply(query, key, value, tuple(query_lens), tuple(key_lens), sinks, tree)
    return attended


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_lens: tuple[int, ...],
        key_lens: tuple[int, ...],
        sinks: Tensor | None,
        tree: PrefixTree | None,
    ) -> Tensor:
        parents = None if tree is None else tree.parents
        out, log_sums = torch.ops.rl_backend.attend_on_cpu(query, key, value, query_lens, key_lens, sinks, parents)
        ctx.save_for_backward(query, key, value, out, log_sums, sinks)
        ctx.runs = query_lens, key_lens, tree
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = gradients_on_cpu(grad, *ctx.saved_tensors, *ctx.runs)
        grad_query, grad_key, grad_value, grad_sinks = grads
        return grad_query, grad_key, grad_value, None, None, grad_sinks, None


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    sinks: Tensor | None,
    tree: PrefixTree | None = None,
) -> tuple[Tensor, Tensor]:
    """What is attended to, and what the backward pass needs of it: (N, heads), the logarithms of the sums, in float32 or
    float64.
    """
    q, k, v = _for_kernel(query, key, value)
    # Of each query more than one result is added up.
    out = q.new_empty(q.shape, dtype=sum_dtype(q.dtype))
    log_sums = q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))
    for part in parts_of(query_lens, key_lens, tree):
        keys, values = part.of_heads(k, query.shape[1]), part.of_heads(v, query.shape[1])
        attended, sums = _kernel(part.queries(q), keys, values, is_causal=not part.earlier, scale=query.shape[-1] ** -0.5)
        if part.earlier:
            _merge(part.queries(out), part.queries(log_sums), sums, attended)
        else:
            part.queries(out).copy_(attended)
            part.queries(log_sums).copy_(sums)
    if sinks is not None:
        # Once for each query, of a key whose value is 0.
        _merge(out, log_sums, sinks.to(log_sums.dtype).expand_as(log_sums))
    return out[..., : value.shape[-1]].to(query.dtype).contiguous(), log_sums


def _merge(rows: Tensor, sums: Tensor, other: Tensor, attended: Tensor | None = None) -> None:
    """Into ``rows``, what the same queries attend to elsewhere: each weighs as much as its sum has of both."""
    # Of operations that give a number the same bits wherever it stands, which logaddexp and addcmul do not.
    largest = torch.maximum(sums, other)
    both = (sums - largest).exp_().add_((other - largest).exp_()).log_().add_(largest)
    rows.mul_((sums - both).exp_().unsqueeze(-1))
    if attended is not None:
        rows.add_(attended * (other - both).exp_().unsqueeze(-1))
    sums.copy_(both)


def gradients_on_cpu(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    sinks: Tensor | None,
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    tree: PrefixTree | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of what :func:`attend_on_cpu` took: queries, keys, values and sinks."""
    q, k, v = _for_kernel(query, key, value)
    grad_rows, out_rows = (_padded(x, q.shape[-1]).contiguous() for x in (grad, out))
    grad_q = q.new_empty(q.shape, dtype=log_sums.dtype)
    grad_k, grad_v = (q.new_empty(*key.shape[:2], q.shape[-1], dtype=log_sums.dtype) for _ in range(2))
    for part in parts_of(query_lens, key_lens, tree):
        # By the sums of all that the queries see, each part of which has its share of the gradient (Dao et al., 2022).
        of_queries, *of_keys = _backward_kernel(
            part.queries(grad_rows),
            part.queries(q),
            part.of_heads(k, query.shape[1]),
            part.of_heads(v, query.shape[1]),
            part.queries(out_rows),
            part.queries(log_sums),
            0.0,
            not part.earlier,
            scale=query.shape[-1] ** -0.5,
        )
        rows = part.queries(grad_q)
        (rows.add_ if part.earlier else rows.copy_)(of_queries)
        for whole, of_part in zip((grad_k, grad_v), of_keys, strict=True):
            # Heads that share keys are neighbours.
            of_group, own = of_part.unflatten(1, (key.shape[1], -1)), part.keys(whole)
            if part.earlier and tree is not None:
                own.add_(of_group.sum(2))
            else:
                # Nothing else has these keys, or comes before.
                torch.sum(of_group, 2, dtype=whole.dtype, out=own)
    grad_sinks = None
    if sinks is not None:
        # As of a score whose value is 0.
        weights = (sinks.to(log_sums.dtype) - log_sums).exp_()
        grad_sinks = weights.mul_((grad.to(log_sums.dtype) * out).sum(-1)).sum(0).neg_().to(sinks.dtype)
    grad_query, grad_key, grad_value = (
        x[..., : like.shape[-1]].to(like.dtype) for x, like in ((grad_q, query), (grad_k, key), (grad_v, value))
    )
    return grad_query, grad_key, grad_value, grad_sinks


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which results of these are added up."""
    return torch.promote_types(dtype, torch.float32)


def _for_kernel(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # It takes one width: zeros change neither scores nor the features that are kept.
    width = max(query.shape[-1], value.shape[-1])
    return _padded(query, width), _padded(key, width), _padded(value, width)


def _padded(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    # It reads features that are next to each other.
    return x if x.stride(-1) == 1 else x.contiguous()


class _Part(NamedTuple):
    """Queries of ``batch`` neighbouring segments of equal lengths, and those keys of theirs that they are multiplied with at
    one time: causally their own, which are the segments' last, or ``earlier`` ones, which all of the queries see.
    """

    first_query: int
    first_key: int
    query_len: int  # of each segment
    key_len: int
    batch: int
    earlier: bool

    def queries(self, x: Tensor) -> Tensor:
        """(N, heads, ...) -> (batch, heads, query_len, ...), a view."""
        rows: Tensor = x[self.first_query :][: self.batch * self.query_len].unflatten(0, (self.batch, -1))
        return rows.transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        """(M, heads, dim) -> (batch, heads, keys, dim), a view."""
        rows: Tensor = x[self.first_key :][: self.batch * self.key_len].unflatten(0, (self.batch, -1))
        own = self.key_len - self.query_len
        return (rows[:, :own] if self.earlier else rows[:, own:]).transpose(1, 2)

    def of_heads(self, x: Tensor, heads: int) -> Tensor:
        """(M, kv_heads, dim) -> (batch, heads, keys, dim): the kernel takes no fewer heads of keys than of queries."""
        keys = self.keys(x)
        return keys if keys.shape[1] == heads else keys.repeat_interleave(heads // keys.shape[1], dim=1)


def parts_of(query_lens: Sequence[int], key_lens: Sequence[int], tree: PrefixTree | None) -> Iterator[_Part]:
    """The parts that attention is computed in: of each query its own keys first."""
    first_query = first_key = 0
    for (queries, keys), run in groupby(zip(query_lens, key_lens, strict=True)):
        at, count = (first_query, first_key, queries, keys), len(list(run))
        if queries:
            yield _Part(*at, count, earlier=False)
            if keys > queries:
                yield _Part(*at, count, earlier=True)
        first_query += count * queries
        first_key += count * keys
    if tree is None:
        return
    for start, length, after in zip(tree.starts, tree.lengths, tree.rows_after, strict=True):
        if after:
            # Rows that continue a run are next to it, and see all of it.
            yield _Part(start + length, start, after, length + after, 1, earlier=True)


# One operation for what watches operations: activation checkpointing keeps what it gives.
_OPERATORS = torch.library.Library("rl_backend", "FRAGMENT")
_OPERATORS.define(
    "attend_on_cpu(Tensor query, Tensor key, Tensor value, int[] query_lens, int[] key_lens, Tensor? sinks,"
    " int[]? parents) -> (Tensor, Tensor)"
)


def _attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lens: list[int],
    key_lens: list[int],
    sinks: Tensor | None,
    parents: list[int] | None,
) -> tuple[Tensor, Tensor]:
    tree = None if parents is None else PrefixTree(tuple(query_lens), tuple(parents), ends=())
    return attend_on_cpu(query, key, value, query_lens, key_lens, sinks, tree)


_OPERATORS.impl("attend_on_cpu", _attend_on_cpu, "CPU")
