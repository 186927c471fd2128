"""Reads a GPT-NeoX ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_backend import ModelOptions
from rl_backend.model.hf_config import HFConfig
from rl_backend.primitive.rope import Rotary


class GPTNeoXOptions(ModelOptions):
    """No options of its own."""


@dataclass(frozen=True)
class GPTNeoXArchitecture:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    parallel_residual: bool
    rotary: Rotary

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def parse_config(hf_config: Mapping[str, Any]) -> GPTNeoXArchitecture:
    config = HFConfig(hf_config, "gpt_neox")
    config.require(
        {
            "hidden_act": ("gelu",),
            "attention_bias": (True,),
            "attention_dropout": (0.0,),
            "hidden_dropout": (0.0,),
            "tie_word_embeddings": (False,),
            "rope_scaling": (),
            "quantization_config": (),
        }
    )
    heads, hidden_size = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    if hidden_size % heads:
        config.refuse("hidden_size", hidden_size, f"num_attention_heads={heads} must divide it")
    return GPTNeoXArchitecture(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive_int("intermediate_size"),
        num_layers=config.positive_int("num_hidden_layers"),
        num_heads=heads,
        layer_norm_eps=config.positive_float("layer_norm_eps", 1e-5),
        parallel_residual=config.flag("use_parallel_residual", True),
        rotary=_rotary(config, hidden_size // heads),
    )


def _rotary(config: HFConfig, head_dim: int) -> Rotary:
    """transformers 5 writes ``rope_parameters``, earlier versions ``rotary_pct`` and ``rotary_emb_base``."""
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type", "default") != "default":
        config.refuse("rope_parameters", rope, "only the default rotary embedding is implemented")
    rotated = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    theta = rope.get("rope_theta", config.get("rotary_emb_base", 10000.0))
    return Rotary(int(head_dim * rotated), float(theta))
