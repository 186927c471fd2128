"""What the dense decoders have in common and where they differ."""

from __future__ import annotations

from dataclasses import dataclass

from rl_backend.contracts import ModelOptions
from rl_backend.primitive.rope import Rotary


class DenseOptions(ModelOptions):
    """Dense decoders have no options of their own; the type exists so that an unknown one is refused."""


@dataclass(frozen=True)
class DenseArchitecture:
    """A pre-norm decoder with grouped-query attention, rotary embedding and a gated feed-forward block.

    Attributes:
        head_dim: need not be ``hidden_size / num_heads``.
        rotary: angles of queries and keys.
        max_length: longest sequence, in tokens.
        windows: for each layer, how many tokens a token sees, itself included; None for all before it.
        qkv_bias, output_bias: whether the attention's projections of queries, keys and values, and of its output, have
            biases.
        mlp_bias: whether the feed-forward block's have.
        qk_norm: whether each head's queries and keys are RMS-normalised before the rotation.
        tie_word_embeddings: whether the language-model head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    max_length: int
    windows: tuple[int | None, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)
