"""Causal attention over packed sequences on a CPU, by the flash kernel that torch has for it.

Forward and backward are one operation of torch each, for compiled code and for what watches operations.
"""

from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backend.primitive.float32 import wide_dtype

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    sinks: Tensor | None = None,
    *,
    tree: bool = False,
) -> Tensor:
    """Packed causal attention; arguments as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Queries attend to their own keys and to earlier ones apart, which are merged as in the cascades of FlashInfer (arXiv
    2501.01005). Neighbouring segments of equal lengths are computed together. In float32 and float64 what a segment attends
    to has the same bits alone, beside others and with any number of threads.

    Args:
        cu_queries, cu_keys: (S + 1,) int32 or int64, where each segment starts in the queries and in the keys, and their
            numbers.
        tree: whether the segments are the runs of a :class:`~rl_backend.primitive.prefix_tree.PrefixTree`. Keys are then
            those of its rows, while ``cu_keys`` adds up whole paths. The queries of all that continue a run attend to its
            keys together.
    """
    # Compiled code gives a function no tensor twice.
    others = None if cu_keys is cu_queries else cu_keys
    attended: Tensor = _CpuAttention.apply(query, key, value, cu_queries, others, sinks, tree)
    return attended


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_queries: Tensor,
        cu_keys: Tensor | None,
        sinks: Tensor | None,
        tree: bool,
    ) -> Tensor:
        out, log_sums = torch.ops.rl_backend.cpu_attention(query, key, value, cu_queries, cu_keys, sinks, tree)
        ctx.save_for_backward(query, key, value, out, log_sums, cu_queries, cu_keys, sinks)
        ctx.tree = tree
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *others, sinks = ctx.saved_tensors
        grads = torch.ops.rl_backend.cpu_attention_backward(grad, *others, sinks, ctx.tree)
        grad_query, grad_key, grad_value, grad_sinks = grads
        return grad_query, grad_key, grad_value, None, None, None if sinks is None else grad_sinks, None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor | None,
    sinks: Tensor | None,
    tree: bool,
) -> tuple[Tensor, Tensor]:
    """What is attended to, and what the backward pass needs of it: (N, heads), the logarithms of the sums, in float32 or
    float64.
    """
    q, k, v = _for_kernel(query, key, value)
    # Of each query more than one result is added up.
    out = q.new_empty(q.shape, dtype=wide_dtype(q.dtype))
    log_sums = q.new_empty(q.shape[:2], dtype=out.dtype)
    for part in _parts_of(key, cu_queries, cu_keys, tree):
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


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor | None,
    sinks: Tensor | None,
    tree: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of queries, keys, values and sinks; (0,) without sinks."""
    q, k, v = _for_kernel(query, key, value)
    grad_rows, out_rows = (_padded(x, q.shape[-1]).contiguous() for x in (grad, out))
    grad_q, grad_k, grad_v = wide = _unfilled_gradients(query, key, value)
    for part in _parts_of(key, cu_queries, cu_keys, tree):
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
            if part.earlier and tree:
                own.add_(of_group.sum(2))
            else:
                # Nothing else has these keys, or comes before.
                torch.sum(of_group, 2, dtype=whole.dtype, out=own)
    grad_sinks = grad.new_empty(0)
    if sinks is not None:
        # As of a score whose value is 0.
        weights = (sinks.to(log_sums.dtype) - log_sums).exp_()
        grad_sinks = weights.mul_((grad.to(log_sums.dtype) * out).sum(-1)).sum(0).neg_().to(sinks.dtype)
    return *_narrowed(wide, query, key, value), grad_sinks


def _unfilled_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In which gradients of all parts are added up, of the kernel's width."""
    width, dtype = max(query.shape[-1], value.shape[-1]), wide_dtype(query.dtype)
    of_query, of_key, of_value = (x.new_empty(*x.shape[:2], width, dtype=dtype) for x in (query, key, value))
    return of_query, of_key, of_value


def _narrowed(gradients: tuple[Tensor, Tensor, Tensor], *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (x[..., : like.shape[-1]].to(like.dtype) for x, like in zip(gradients, inputs, strict=True))
    return of_query, of_key, of_value


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


def _parts_of(key: Tensor, cu_queries: Tensor, cu_keys: Tensor | None, tree: bool) -> tuple[_Part, ...]:
    query_edges = tuple(cu_queries.tolist())
    key_edges = query_edges if cu_keys is None else tuple(cu_keys.tolist())
    # The kernel would read what lies behind the keys.
    assert key.shape[0] == (query_edges if tree else key_edges)[-1], "keys are those of the segments"
    return _parts(query_edges, key_edges, tree)


# The layers of a model ask for the same in turn, forward and backward.
@lru_cache(maxsize=8)
def _parts(cu_queries: tuple[int, ...], cu_keys: tuple[int, ...], tree: bool) -> tuple[_Part, ...]:
    """The parts that attention is computed in: of each query its own keys first."""
    parts: list[_Part] = []
    query_lens, key_lens = ([stop - start for start, stop in pairwise(each)] for each in (cu_queries, cu_keys))
    first_query = first_key = 0
    for (queries, keys), run in groupby(zip(query_lens, query_lens if tree else key_lens, strict=True)):
        at, count = (first_query, first_key, queries, keys), len(list(run))
        if queries:
            parts.append(_Part(*at, count, earlier=False))
            if keys > queries:
                parts.append(_Part(*at, count, earlier=True))
        first_query += count * queries
        first_key += count * keys
    if not tree:
        return tuple(parts)
    keys_before = [keys - queries for queries, keys in zip(query_lens, key_lens, strict=True)]
    for number, keys in enumerate(key_lens):
        # Runs that continue this one come next, depth first, and have all keys of its path before their own.
        stop = next((other for other in range(number + 1, len(key_lens)) if keys_before[other] < keys), len(key_lens))
        start, first, last = cu_queries[number], cu_queries[number + 1], cu_queries[stop]
        if last > first:
            parts.append(_Part(first, start, last - first, last - start, 1, earlier=True))
    return tuple(parts)


def _like_attended(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | bool | None) -> tuple[Tensor, Tensor]:
    log_sums = query.new_empty(query.shape[:2], dtype=wide_dtype(query.dtype))
    return query.new_empty(*query.shape[:2], value.shape[-1]), log_sums


def _like_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, sinks, _ = others
    of_sinks: Tensor = grad.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *_narrowed(_unfilled_gradients(query, key, value), query, key, value), of_sinks


_SEGMENTS = "Tensor cu_queries, Tensor? cu_keys, Tensor? sinks, bool tree"
_OPERATORS = torch.library.Library("rl_backend", "FRAGMENT")
_OPERATORS.define(f"cpu_attention(Tensor query, Tensor key, Tensor value, {_SEGMENTS}) -> (Tensor, Tensor)")
_OPERATORS.impl("cpu_attention", _attend, "CPU")
_OPERATORS.impl("cpu_attention", _like_attended, "Meta")
_OPERATORS.define(
    "cpu_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums,"
    f" {_SEGMENTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
_OPERATORS.impl("cpu_attention_backward", _gradients, "CPU")
_OPERATORS.impl("cpu_attention_backward", _like_gradients, "Meta")
