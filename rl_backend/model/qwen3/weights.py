"""Hugging Face names of dense Qwen3's parameters."""

from __future__ import annotations

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, Head
from rl_backend.model.qwen3.config import Qwen3Architecture

_LAYER_PARAMETERS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def weight_names(arch: Qwen3Architecture, head: Head) -> dict[str, str]:
    """Parameter name -> Hugging Face name, in export order. Tied embeddings have no ``lm_head.weight``."""
    names = {"embed_tokens.weight": "model.embed_tokens.weight"}
    for index in range(arch.num_layers):
        for parameter in _LAYER_PARAMETERS:
            names[f"layers.{index}.{parameter}"] = f"model.layers.{index}.{parameter}"
    names["norm.weight"] = "model.norm.weight"
    if head == "values":
        names.update({name: name for name in VALUE_HEAD_WEIGHTS})
    elif not arch.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    return names
