"""How a dense decoder is laid out over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from rl_backend.contracts import NativeConfig
from rl_backend.model.dense.model import DenseAttention, DenseDecoder, DenseLayer
from rl_backend.parallel.context import ContextParallelAttention
from rl_backend.parallel.fsdp import apply_fsdp, checkpoint_layers
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.feed_forward import SwiGLU

if TYPE_CHECKING:
    from rl_backend.parallel.groups import ParallelGroups


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Tensor and context parallelism, activation checkpointing and FSDP2, each layer a unit of its own."""
    if not isinstance(module, DenseDecoder):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected DenseDecoder")
    split_decoder(module, groups)
    if groups.tp_group.size() > 1:
        tensor = TensorParallel(groups.tp_mesh)
        for layer in module.layers.values():
            split_feed_forward(layer.mlp, tensor)
    shard_decoder(module, groups, config)


def shard_decoder(
    module: DenseDecoder, groups: ParallelGroups, config: NativeConfig, experts: Sequence[nn.Module] = ()
) -> None:
    """Activation checkpointing and FSDP2; ``experts`` as in :func:`~rl_backend.parallel.fsdp.apply_fsdp`."""
    layers = list(module.layers.values())
    if config.activation_checkpointing == "full":
        checkpoint_layers(layers)
    apply_fsdp(module, layers, groups, config, experts=experts)


def split_decoder(module: DenseDecoder, groups: ParallelGroups) -> None:
    """Lays out everything but the feed-forward blocks over tensor- and context-parallel ranks."""
    if groups.cp_group.size() > 1:
        for layer in module.layers.values():
            assert isinstance(layer, DenseLayer)
            layer.self_attn.attend = ContextParallelAttention(groups.cp_group)
    if groups.tp_group.size() == 1:
        return
    tensor = TensorParallel(groups.tp_mesh)
    if module.embed_tokens is not None:
        tensor.vocabulary(module.embed_tokens)
    for layer in module.layers.values():
        assert isinstance(layer, DenseLayer)
        tensor.replicate(layer.input_layernorm)
        _split_attention(layer.self_attn, tensor)
        tensor.replicate(layer.post_attention_layernorm)
    if module.norm is None:
        return
    tensor.replicate(module.norm)
    if module.score is not None:
        tensor.gather_input(module.score, sum_gradients=False)
        tensor.replicate(module.score, partial=False)
        return
    for head in (module.lm_head, module.tied_head):
        if head is not None:
            tensor.split_rows(head)
    module.next_token_log_probs = tensor.vocabulary_head(module.arch.vocab_size)


def split_feed_forward(mlp: object, tensor: TensorParallel) -> None:
    """Splits the intermediate features of a :class:`~rl_backend.primitive.feed_forward.SwiGLU`."""
    assert isinstance(mlp, SwiGLU)
    tensor.gather_input(mlp)
    tensor.column(mlp.gate_proj)
    tensor.column(mlp.up_proj)
    tensor.row(mlp.down_proj)


def _split_attention(attention: DenseAttention, tensor: TensorParallel) -> None:
    """Splits the heads."""
    tensor.gather_input(attention)
    tensor.column(attention.q_proj)
    kv_heads = attention.k_proj.out_features // attention.head_dim
    tensor.key_or_value(attention.k_proj, kv_heads)
    tensor.key_or_value(attention.v_proj, kv_heads)
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            tensor.replicate(norm)
    tensor.row(attention.o_proj)
