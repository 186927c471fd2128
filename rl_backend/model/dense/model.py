"""A dense decoder on packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl_backend.contracts import BatchError, Head, ModelOutput
from rl_backend.model.dense.architecture import DenseArchitecture
from rl_backend.model.registry import ModelInput, ModelStage
from rl_backend.primitive.attention import Attend, Segments, packed_attention
from rl_backend.primitive.feed_forward import SwiGLU
from rl_backend.primitive.log_prob import NextToken, next_token_log_probs
from rl_backend.primitive.norm import RMSNorm
from rl_backend.primitive.rope import apply_rotary, rotary_cos_sin
from rl_backend.primitive.value_head import ValueHead


class DenseAttention(nn.Module):
    """Grouped-query attention; (T, hidden_size) -> (T, hidden_size)."""

    def __init__(self, arch: DenseArchitecture, window: int | None) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.window = window
        self.attend: Attend = packed_attention
        query_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, query_size, bias=arch.qkv_bias)
        self.k_proj = nn.Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.v_proj = nn.Linear(arch.hidden_size, kv_size, bias=arch.qkv_bias)
        self.o_proj = nn.Linear(query_size, arch.hidden_size, bias=arch.output_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps) if arch.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        attended = self.attend(query, key, value, segments, self.window)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


class DenseLayer(nn.Module):
    """Attention and a feed-forward block, each normalised before and added to the residual stream."""

    def __init__(self, arch: DenseArchitecture, window: int | None, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = DenseAttention(arch, window)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segments)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class DenseDecoder(nn.Module):
    """The whole model, or a stage of it.

    Keeps no buffers, so a copy built on the meta device needs its parameters and nothing else. Every token is trained:
    unlike in transformers, ``pad_token_id`` has no part in it, because padding never reaches a model.
    """

    def __init__(
        self, arch: DenseArchitecture, head: Head, log_prob_chunk_tokens: int, stage: ModelStage | None = None
    ) -> None:
        super().__init__()
        stage = stage or ModelStage(True, range(arch.num_layers), True)
        self.arch = arch
        self.log_prob_chunk_tokens = log_prob_chunk_tokens
        self.next_token_log_probs: Callable[..., NextToken] = next_token_log_probs
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size) if stage.first else None
        self.layers = nn.ModuleDict({str(index): self.make_layer(index) for index in stage.layers})
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps) if stage.last else None
        self.score = ValueHead(arch.hidden_size) if stage.last and head == "values" else None
        self.lm_head = self._make_head() if stage.last and head == "log_probs" and not arch.tie_word_embeddings else None
        tied_apart = stage.last and head == "log_probs" and arch.tie_word_embeddings and not stage.first
        self.tied_head = self._make_head() if tied_apart else None

    def _make_head(self) -> nn.Linear:
        return nn.Linear(self.arch.hidden_size, self.arch.vocab_size, bias=False)

    def make_layer(self, index: int) -> nn.Module:
        """The layer number ``index``."""
        arch = self.arch
        return DenseLayer(arch, arch.windows[index], SwiGLU(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias))

    def apply_layer(self, layer: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor, inputs: ModelInput) -> Tensor:
        """Runs one layer of :meth:`make_layer`; (T, hidden_size) -> (T, hidden_size)."""
        return layer(hidden, cos, sin, inputs.segments)  # type: ignore[no-any-return]

    def forward(self, inputs: ModelInput) -> ModelOutput | Tensor:
        """Log-probs and, on request, entropy of (T,) tokens; or their values; or hidden states for the next stage.

        The head is applied here and not by the loss: with FSDP its weight is whole only during this forward.

        Raises:
            BatchError: a sequence longer than ``max_length``, or a token outside the vocabulary (on a CPU).
        """
        hidden = self._embed(inputs)
        cos, sin = rotary_cos_sin(inputs.position_ids, self.arch.rotary, hidden.dtype)
        for layer in self.layers.values():
            hidden = self.apply_layer(layer, hidden, cos, sin, inputs)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        if self.score is not None:
            return ModelOutput(values=self.score(hidden))
        head = self.lm_head or self.tied_head or self.embed_tokens
        assert head is not None, "a last stage has one of them"
        log_probs, entropy = self.next_token_log_probs(
            hidden,
            head.weight,
            inputs.labels,
            temperature=inputs.temperature,
            chunk_tokens=self.log_prob_chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
        )
        return ModelOutput(log_probs=log_probs, entropy=entropy)

    def _embed(self, inputs: ModelInput) -> Tensor:
        if self.embed_tokens is None:
            assert inputs.hidden is not None, "only the first stage starts from tokens"
            return inputs.hidden
        self._check(inputs)
        hidden: Tensor = self.embed_tokens(inputs.input_ids)
        return hidden

    def _check(self, inputs: ModelInput) -> None:
        if inputs.longest > self.arch.max_length:
            raise BatchError(
                f"a sequence of {inputs.longest} tokens is longer than the model's {self.arch.max_length} positions",
                longest=inputs.longest,
            )
        if inputs.input_ids.device.type == "cpu":
            smallest, largest = (int(value) for value in torch.aminmax(inputs.input_ids))
            if smallest < 0 or largest >= self.arch.vocab_size:
                raise BatchError(
                    f"input_ids reach from {smallest} to {largest}; the vocabulary has {self.arch.vocab_size} tokens"
                )
