"""Attention on the meta device, where tensors have shapes and no numbers: what a fused kernel makes and keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def meta_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Shapes as in :func:`~rl_backend.primitive.attention.packed_attention`.

    Keeps its inputs, its output and a float32 log-sum-exp per query and head, as flash attention (Dao et al., arXiv
    2205.14135) and :func:`~rl_backend.primitive.blocked_attention.blocked_attention` do.
    """
    attended: Tensor = _MetaAttention.apply(query, key, value)
    return attended


class _MetaAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
