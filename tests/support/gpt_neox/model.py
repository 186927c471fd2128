"""GPT-NeoX on packed micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_backend import ModelInput, ModelOutput
from rl_backend.primitive.attention import Segments, packed_attention
from rl_backend.primitive.log_prob import next_token_log_probs
from rl_backend.primitive.rope import apply_rotary, rotary_cos_sin
from tests.support.gpt_neox.config import GPTNeoXArchitecture


class Attention(nn.Module):
    """Queries, keys and values of each head lie together in one projection; a part of each head is rotated."""

    def __init__(self, arch: GPTNeoXArchitecture) -> None:
        super().__init__()
        self.num_heads, self.rotated = arch.num_heads, arch.rotary.head_dim
        self.query_key_value = nn.Linear(arch.hidden_size, 3 * arch.hidden_size)
        self.dense = nn.Linear(arch.hidden_size, arch.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        query, key, value = self.query_key_value(x).unflatten(-1, (self.num_heads, -1)).chunk(3, dim=-1)
        attended = packed_attention(self._rotate(query, cos, sin), self._rotate(key, cos, sin), value, segments)
        return self.dense(attended.flatten(1))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((apply_rotary(x[..., : self.rotated], cos, sin), x[..., self.rotated :]), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, arch: GPTNeoXArchitecture) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(arch.hidden_size, arch.intermediate_size)
        self.dense_4h_to_h = nn.Linear(arch.intermediate_size, arch.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Layer(nn.Module):
    """With the parallel residual, attention and feed-forward read the same hidden state."""

    def __init__(self, arch: GPTNeoXArchitecture) -> None:
        super().__init__()
        self.parallel_residual = arch.parallel_residual
        self.input_layernorm = nn.LayerNorm(arch.hidden_size, arch.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(arch.hidden_size, arch.layer_norm_eps)
        self.attention = Attention(arch)
        self.mlp = FeedForward(arch)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        attended = x + self.attention(self.input_layernorm(x), cos, sin, segments)
        return attended + self.mlp(self.post_attention_layernorm(x if self.parallel_residual else attended))


class GPTNeoX(nn.Module):
    def __init__(self, arch: GPTNeoXArchitecture, log_prob_chunk_tokens: int) -> None:
        super().__init__()
        self.rotary, self.log_prob_chunk_tokens = arch.rotary, log_prob_chunk_tokens
        self.embed_in = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch) for _ in range(arch.num_layers))
        self.final_layer_norm = nn.LayerNorm(arch.hidden_size, arch.layer_norm_eps)
        self.embed_out = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)

    def forward(self, inputs: ModelInput) -> ModelOutput:
        hidden = self.embed_in(inputs.input_ids)
        cos, sin = rotary_cos_sin(inputs.position_ids, self.rotary, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, inputs.segments)
        found = next_token_log_probs(
            self.final_layer_norm(hidden),
            self.embed_out.weight,
            inputs.labels,
            temperature=inputs.temperature,
            chunk_tokens=self.log_prob_chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
            top=inputs.num_top,
            cuts=inputs.cuts,
        )
        return found.as_output()
