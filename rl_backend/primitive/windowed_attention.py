"""Causal attention that sees only the last tokens, for kernels without windows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 512


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, seq_lens: Sequence[int], window: int) -> Tensor:
    """Packed attention of each token to the last ``window`` tokens of its sequence, itself included.

    Shapes as in :func:`~rl_backend.primitive.attention.packed_attention`. Each block of queries is multiplied with the keys
    that some of its queries see, so that work and memory grow with the window and not with the square of the length.
    """
    heads = query.shape[1]
    if query.is_cuda and key.shape[1] != heads:
        # The memory-efficient kernel takes no groups.
        key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    outputs = []
    origin = 0
    for length in seq_lens:
        for start in range(0, length, _BLOCK):
            stop, first = min(start + _BLOCK, length), max(0, start - window + 1)
            outputs.append(
                F.scaled_dot_product_attention(
                    _batched(query, origin + start, origin + stop),
                    _batched(key, origin + first, origin + stop),
                    _batched(value, origin + first, origin + stop),
                    attn_mask=_visible(start, stop, first, window, query.device),
                    enable_gqa=key.shape[1] != heads,
                )
            )
        origin += length
    return torch.cat([rows.squeeze(0).transpose(0, 1) for rows in outputs])


def _batched(x: Tensor, start: int, stop: int) -> Tensor:
    """(T, heads, dim) -> (1, heads, stop - start, dim), a view."""
    return x[start:stop].transpose(0, 1).unsqueeze(0)


def _visible(start: int, stop: int, first: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool: a query at q sees the keys at q - window + 1 to q."""
    distance = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)
    return (distance >= 0) & (distance < window)
