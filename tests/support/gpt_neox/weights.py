"""Hugging Face names of GPT-NeoX's parameters."""

from __future__ import annotations

from rl_backend import Head
from tests.support.gpt_neox.config import GPTNeoXArchitecture

_LAYER_MODULES = (
    "input_layernorm",
    "post_attention_layernorm",
    "attention.query_key_value",
    "attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)

STORED_BUFFERS = ("attention.bias", "attention.masked_bias")
"""Causal masks that old checkpoints store beside the weights."""


def weight_names(arch: GPTNeoXArchitecture, head: Head) -> dict[str, str]:
    names = {"embed_in.weight": "gpt_neox.embed_in.weight"}
    for index in range(arch.num_layers):
        for module in _LAYER_MODULES:
            for parameter in ("weight", "bias"):
                name = f"layers.{index}.{module}.{parameter}"
                names[name] = f"gpt_neox.{name}"
    for parameter in ("weight", "bias"):
        names[f"final_layer_norm.{parameter}"] = f"gpt_neox.final_layer_norm.{parameter}"
    return {**names, "embed_out.weight": "embed_out.weight"}
