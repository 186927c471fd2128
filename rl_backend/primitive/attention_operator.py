"""Packed attention as an operator of torch, for compiled code: one operator whatever the lengths of the segments are."""

from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rl_backend.primitive.attention import Segments, packed_attention, varlen_attention
from rl_backend.primitive.cpu_attention import attend_on_cpu, gradients_on_cpu, sum_dtype
from rl_backend.primitive.prefix_tree import PrefixTree, take_rows


def has_operator(device: torch.device, dtype: torch.dtype, window: int | None, *, sinks: bool) -> bool:
    """Whether :func:`compiled_attention` has a form for these: those that :func:`packed_attention` has one kernel for."""
    if device.type == "cuda":
        return dtype in (torch.bfloat16, torch.float16) and not sinks
    return window is None


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
    attended: Tensor = torch.ops.rl_backend.cpu_attention(query, key, value, edges, sinks)[0]
    return attended


class _Runs(NamedTuple):
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    tree: PrefixTree | None

    @classmethod
    def of(cls, edges: Tensor) -> Self:
        queries, keys, *parents = edges.tolist()
        query_lens, key_lens = (tuple(stop - start for start, stop in pairwise(row)) for row in (queries, keys))
        if not parents:
            return cls(query_lens, key_lens, None)
        return cls(query_lens, query_lens, PrefixTree(query_lens, tuple(parents[0][1:]), ends=()))


@torch.library.custom_op(
    "rl_backend::cpu_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor edges, Tensor? sinks) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is attended to, and (N, heads), the logarithms of its sums."""
    runs = _Runs.of(edges)
    return attend_on_cpu(query, key, value, runs.query_lens, runs.key_lens, sinks, runs.tree)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    tokens, heads = query.shape[:2]
    log_sums = query.new_empty(tokens, heads, dtype=sum_dtype(query.dtype))
    return query.new_empty(tokens, heads, value.shape[-1]), log_sums


@torch.library.custom_op(
    "rl_backend::cpu_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, Tensor edges, "
    "Tensor? sinks) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    edges: Tensor,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    runs = _Runs.of(edges)
    *grads, grad_sinks = gradients_on_cpu(grad, query, key, value, out, log_sums, sinks, *runs)
    grad_query, grad_key, grad_value = (x.contiguous() for x in grads)
    return grad_query, grad_key, grad_value, query.new_empty(0) if grad_sinks is None else grad_sinks


@_gradients.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads, sinks = [x.new_empty(x.shape) for x in (query, key, value)], others[-1]
    return grads[0], grads[1], grads[2], query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, edges, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, edges, sinks)


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *others, sinks = ctx.saved_tensors
    grads = torch.ops.rl_backend.cpu_attention_backward(grad, *others, sinks)
    grad_query, grad_key, grad_value, grad_sinks = grads
    return grad_query, grad_key, grad_value, None, None if sinks is None else grad_sinks


_attend.register_autograd(_backward, setup_context=_keep)
