"""Attention of latent queries, keys and values, for Megatron without Transformer Engine."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

LATENT_EPS = 1e-6
"""Of the norms of latents, in DeepSeek's code, in transformers and in the native runtime."""


class LatentCoreAttention(nn.Module):
    """Causal attention whose keys and values have different sizes, which Megatron's own ``DotProductAttention`` refuses.

    Sequences are padded on the right, so the causal mask is the only one that real tokens need.
    """

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float, **_: object) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """From (tokens, rows, heads, features) to (tokens, rows, heads * features of a value)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)
