"""Hugging Face names of a dense decoder's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, Head, WeightName
from rl_backend.model.dense.architecture import DenseArchitecture


def weight_names(arch: DenseArchitecture, head: Head) -> dict[str, WeightName]:
    """Parameter name -> Hugging Face name, in export order. Tied embeddings have no ``lm_head.weight``."""

    def layer_names(index: int) -> dict[str, WeightName]:
        parameters = (*attention_and_norms(arch), *feed_forward(arch))
        return {f"layers.{index}.{name}": f"model.layers.{index}.{name}" for name in parameters}

    return decoder_names(arch, head, layer_names)


def decoder_names(
    arch: DenseArchitecture, head: Head, layer_names: Callable[[int], Mapping[str, WeightName]]
) -> dict[str, WeightName]:
    """As :func:`weight_names`, with ``layer_names`` of each layer's number."""
    names: dict[str, WeightName] = {"embed_tokens.weight": "model.embed_tokens.weight"}
    for index in range(arch.num_layers):
        names.update(layer_names(index))
    names["norm.weight"] = "model.norm.weight"
    if head == "values":
        names.update({name: name for name in VALUE_HEAD_WEIGHTS})
    elif not arch.tie_word_embeddings:
        names["lm_head.weight"] = "lm_head.weight"
    return names


def attention_and_norms(arch: DenseArchitecture) -> Iterator[str]:
    """Parameters of a layer outside its feed-forward block."""
    yield "input_layernorm.weight"
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from _linear(f"self_attn.{projection}", arch.output_bias if projection == "o_proj" else arch.qkv_bias)
    if arch.qk_norm:
        yield from ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    yield "post_attention_layernorm.weight"


def feed_forward(arch: DenseArchitecture) -> Iterator[str]:
    """Parameters of a dense feed-forward block."""
    for projection in ("gate_proj", "up_proj", "down_proj"):
        yield from _linear(f"mlp.{projection}", arch.mlp_bias)


def _linear(name: str, bias: bool) -> tuple[str, ...]:
    return (f"{name}.weight", f"{name}.bias") if bias else (f"{name}.weight",)
