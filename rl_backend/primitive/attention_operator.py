"""Packed attention as an operator of torch, for compiled code: one operator whatever the lengths of the segments are."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rl_backend.primitive.attention import (
    Segments,
    attend_in_blocks,
    blocks_of,
    gradients_in_blocks,
    order_by_length,
    packed_attention,
    varlen_attention,
)
from rl_backend.primitive.prefix_tree import take_rows


def has_operator(device: torch.device, dtype: torch.dtype, window: int | None, *, sinks: bool) -> bool:
    """Whether :func:`compiled_attention` has a form for these: those that :func:`packed_attention` has one kernel for."""
    if device.type == "cuda":
        return dtype in (torch.bfloat16, torch.float16) and not sinks
    return dtype in (torch.float32, torch.float64) and window is None


def compiled_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """:func:`~rl_backend.primitive.attention.packed_attention`, which compiled code takes in one piece where the segments'
    lengths are :meth:`hidden <rl_backend.primitive.attention.Segments.hidden>`.
    """
    edges = segments.edges
    if edges is None:
        return packed_attention(query, key, value, segments, window, sinks)
    if query.is_cuda:
        if segments.key_index is not None:
            key, value = (take_rows(x, segments.key_index) for x in (key, value))
        return varlen_attention(query, key, value, segments, window)
    attended: Tensor = torch.ops.rl_backend.blocked_attention(query, key, value, edges, segments.key_index, sinks)[0]
    return attended


def _lengths(edges: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    queries, keys = (tuple(stop - start for start, stop in pairwise(row)) for row in edges.tolist())
    return queries, keys


@torch.library.custom_op(
    "rl_backend::blocked_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor edges, Tensor? rows, Tensor? sinks) -> (Tensor, Tensor)",
)
def _blocked(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, rows: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What is attended to, and the logarithms of sums of all blocks end to end. ``rows``: of the keys of all segments."""
    order = order_by_length(*_lengths(edges))
    key, value = (x if rows is None else take_rows(x, rows) for x in (key, value))
    query, key, value = order.queries.sort(query), order.keys.sort(key), order.keys.sort(value)
    out, log_sums = attend_in_blocks(query, key, value, order.segments, sinks)
    return order.queries.restore(out), torch.cat([each.flatten() for each in log_sums])


@_blocked.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, rows: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(tokens * heads)


@torch.library.custom_op(
    "rl_backend::blocked_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, Tensor edges, Tensor? rows, "
    "Tensor? sinks) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _blocked_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    edges: Tensor,
    rows: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order = order_by_length(*_lengths(edges))
    num_rows = key.shape[0]
    key, value = (x if rows is None else take_rows(x, rows) for x in (key, value))
    grad, query, out = (order.queries.sort(x) for x in (grad, query, out))
    key, value = order.keys.sort(key), order.keys.sort(value)
    blocks = list(blocks_of(query, key, order.segments))
    parts = log_sums.split([block.batch * block.num_queries * query.shape[1] for block in blocks])
    of_blocks = [part.view(block.batch * block.kv_heads, -1, 1) for block, part in zip(blocks, parts, strict=True)]
    found = gradients_in_blocks(grad, query, key, value, out, sinks, order.segments, of_blocks)
    grad_query, grad_key, grad_value, grad_sinks = found
    grad_key, grad_value = (order.keys.restore(x).contiguous() for x in (grad_key, grad_value))
    if rows is not None:
        grad_key, grad_value = (x.new_zeros(num_rows, *x.shape[1:]).index_add_(0, rows, x) for x in (grad_key, grad_value))
    of_sinks = query.new_empty(0) if grad_sinks is None else grad_sinks
    return order.queries.restore(grad_query), grad_key, grad_value, of_sinks


@_blocked_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads, sinks = [x.new_empty(x.shape) for x in (query, key, value)], others[-1]
    return grads[0], grads[1], grads[2], query.new_empty(0) if sinks is None else query.new_empty(sinks.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, edges, rows, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, edges, rows, sinks)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *others, rows, sinks = ctx.saved_tensors
    grads = torch.ops.rl_backend.blocked_attention_backward(grad, *others, rows, sinks)
    grad_query, grad_key, grad_value, grad_sinks = grads
    return grad_query, grad_key, grad_value, None, None, None if sinks is None else grad_sinks


_blocked.register_autograd(_backward, setup_context=_keep)
