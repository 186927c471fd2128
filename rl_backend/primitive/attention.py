"""Causal attention over packed sequences that never see each other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rl_backend.primitive.blocked_attention import blocked_attention
from rl_backend.primitive.windowed_attention import windowed_attention

_VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, seq_lens: Sequence[int], window: int | None = None
) -> Tensor:
    """Softmax attention, causal inside each of B sequences, scaled by ``head_dim ** -0.5``.

    bfloat16 and float16 on CUDA take the variable-length flash kernel, float32 and float64 on a CPU the blocked form, which
    is faster there than SDPA's; everything else takes one SDPA call for each run of neighbouring sequences of equal length.
    Nothing is ever padded.

    Args:
        query: (T, heads, head_dim).
        key, value: (T, kv_heads, head_dim); ``heads`` is a multiple of ``kv_heads`` (grouped-query attention).
        cu_seqlens: (B + 1,) int32 on the device of ``query``.
        seq_lens: the same B lengths as numbers.
        window: tokens that a token sees, itself included; None for all before it (sliding-window attention as in Mistral 7B,
            arXiv 2310.06825).

    Returns:
        (T, heads, head_dim)
    """
    longest = max(seq_lens)
    if window is not None and window >= longest:
        window = None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, cu_seqlens, longest, window)
    if window is None:
        return _whole(query, key, value, seq_lens)
    return _windowed_and_whole(query, key, value, seq_lens, window)


def _whole(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int]) -> Tensor:
    """Without a flash kernel and without a window."""
    if query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64):
        return blocked_attention(query, key, value, seq_lens)
    return _by_runs(query, key, value, seq_lens)


def _windowed_and_whole(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int], window: int) -> Tensor:
    """Only sequences that are longer than the window pay for it; the others are attended together."""
    lengths = list(seq_lens)
    parts = [x.split(lengths) for x in (query, key, value)]
    attended: list[Tensor] = [query] * len(lengths)
    for windowed in (False, True):
        chosen = [index for index, length in enumerate(lengths) if (length > window) is windowed]
        if not chosen:
            continue
        own = [lengths[index] for index in chosen]
        q, k, v = (torch.cat([rows[index] for index in chosen]) for rows in parts)
        rows = windowed_attention(q, k, v, own, window) if windowed else _whole(q, k, v, own)
        for index, row in zip(chosen, rows.split(own), strict=True):
            attended[index] = row
    return torch.cat(attended)


def _varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, window: int | None) -> Tensor:
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if key.shape[1] != query.shape[1]:
        if _VARLEN_HAS_GQA:
            options["enable_gqa"] = True
        else:
            key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    attended = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)
    assert isinstance(attended, Tensor), "the log-sum-exp was not asked for"
    return attended


def _by_runs(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int]) -> Tensor:
    runs = [(length, sum(1 for _ in group)) for length, group in groupby(seq_lens)]
    sizes = [length * count for length, count in runs]
    outputs = [
        _equal_lengths(q, k, v, length)
        for (length, _), q, k, v in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _equal_lengths(query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
    def batched(x: Tensor) -> Tensor:
        rows: Tensor = x.unflatten(0, (-1, length))
        return rows.transpose(1, 2)

    if query.is_cuda:
        # The memory-efficient kernel, the only one for float32 beside the quadratic form, takes no groups.
        key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
    attended = F.scaled_dot_product_attention(
        batched(query), batched(key), batched(value), is_causal=True, enable_gqa=key.shape[1] != query.shape[1]
    )
    packed: Tensor = attended.transpose(1, 2).flatten(0, 1)
    return packed


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)
