"""Small models in the place of those that verl's example scripts name: Qwen3, or a mixture of it where theirs is one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

# Layers of the named models, which settings of pipelines are written for.
LAYERS: Mapping[str, int] = {
    "deepseek-v3": 61,
    "deepseek-v4-flash": 43,
    "hy3": 80,
    "mimo-7b": 36,
    "moonlight-16b": 27,
    "nemotron-3-nano": 52,
    "qwen2.5-0.5b": 24,
    "qwen2.5-32b": 64,
    "qwen2.5-math-7b": 28,
    "qwen2.5-vl-7b": 28,
    "qwen3-8b": 36,
    "qwen3-30b": 48,
    "qwen3-235b": 94,
    "qwen3-vl-2b": 28,
    "qwen3-vl-8b": 36,
    "qwen3-vl-30b": 48,
    "qwen3-vl-235b": 94,
    "qwen3.5-35b": 40,
    "qwen3.5-122b": 48,
    "qwen3.5-397b": 60,
}
_MIXTURE = re.compile(r"-a\d+b|deepseek-v|hy3|nemotron-3")
_FAMILIES = re.compile(r"(deepseek-v[34]|hy3|mimo|moonlight|nemotron-3|qwen2\.5-vl|qwen3-vl|qwen3\.5|qwen2\.5|qwen3)")


def family(name: str) -> str:
    """``qwen3.5-397b-a17b`` -> ``qwen3.5``: what of it the stand-in is not."""
    found = _FAMILIES.search(name.lower())
    return found[1] if found else name


def is_mixture(name: str) -> bool:
    return bool(_MIXTURE.search(name.lower()))


def num_layers(name: str) -> int:
    """Of the named model.

    Raises:
        KeyError: a model that is not in ``LAYERS``.
    """
    return next(LAYERS[known] for known in sorted(LAYERS, key=len, reverse=True) if known in name.lower())


def write_stand_in(folder: Path, tokenizer: Path, *, mixture: bool, layers: int, weights: bool) -> Path:
    """Writes a model's directory with the tokenizer of another one; returns it.

    Args:
        weights: of a model with ``config.json`` alone there are none, which is enough to read settings.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **experts) if mixture else Qwen3Config(**sizes)
    config.architectures = ["Qwen3MoeForCausalLM" if mixture else "Qwen3ForCausalLM"]
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template")):
            shutil.copy(file, folder / file.name)
    AutoConfig.from_pretrained(folder)
    return folder
