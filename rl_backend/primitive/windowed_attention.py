"""Causal attention that sees only the last tokens, for kernels without windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 512


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, query_lens: Sequence[int], key_lens: Sequence[int], window: int
) -> Tensor:
    """Packed attention of each token to the last ``window`` tokens of its segment, itself included.

    Shapes as in :func:`~rl_backend.primitive.attention.packed_attention`. Each block of queries is multiplied with the keys
    that some of its queries see, so that work and memory grow with the window and not with the square of the length.
    """
    heads = query.shape[1]
    if query.is_cuda and key.shape[1] != heads:
        # The memory-efficient kernel takes no groups.
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    outputs = []
    query_origin = key_origin = 0
    for queries, keys in zip(query_lens, key_lens, strict=True):
        for start in range(keys - queries, keys, _BLOCK):
            stop, first = min(start + _BLOCK, keys), max(0, start - window + 1)
            outputs.append(
                F.scaled_dot_product_attention(
                    _batched(query, query_origin, query_origin + stop - start),
                    _batched(key, key_origin + first, key_origin + stop),
                    _batched(value, key_origin + first, key_origin + stop),
                    attn_mask=_visible(start, stop, first, window, query.device),
                    enable_gqa=key.shape[1] != heads,
                )
            )
            query_origin += stop - start
        key_origin += keys
    return torch.cat([rows.squeeze(0).transpose(0, 1) for rows in outputs])


def _batched(x: Tensor, start: int, stop: int) -> Tensor:
    """(T, heads, dim) -> (1, heads, stop - start, dim), a view."""
    return x[start:stop].transpose(0, 1).unsqueeze(0)


def _visible(start: int, stop: int, first: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool: a query at q sees the keys at q - window + 1 to q."""
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return (distance >= 0) & (distance < window)
