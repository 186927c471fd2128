"""Hugging Face names of a dense decoder's parameters."""

from __future__ import annotations

from collections.abc import Iterator

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, Head
from rl_backend.model.dense.architecture import DenseArchitecture


def weight_names(arch: DenseArchitecture, head: Head) -> dict[str, str]:
    """Parameter name -> Hugging Face name, in export order. Tied embeddings have no ``lm_head.weight``."""
    names = {"embed_tokens.weight": "model.embed_tokens.weight"}
    for index in range(arch.num_layers):
        for parameter in _layer_parameters(arch):
            names[f"layers.{index}.{parameter}"] = f"model.layers.{index}.{parameter}"
    names["norm.weight"] = "model.norm.weight"
    if head == "values":
        names.update({name: name for name in VALUE_HEAD_WEIGHTS})
    elif not arch.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    return names


def _layer_parameters(arch: DenseArchitecture) -> Iterator[str]:
    yield "input_layernorm.weight"
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from _linear(f"self_attn.{projection}", arch.output_bias if projection == "o_proj" else arch.qkv_bias)
    if arch.qk_norm:
        yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    yield "post_attention_layernorm.weight"
    for projection in ("gate_proj", "up_proj", "down_proj"):
        yield from _linear(f"mlp.{projection}", arch.mlp_bias)


def _linear(name: str, bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
