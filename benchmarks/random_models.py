"""Random decoders of odd shapes, each determined by its seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

DENSE = ("llama", "mistral", "qwen2", "qwen3")
MIXTURES = ("mixtral", "qwen3_moe")
POSITIONS = 256


class RandomModel(NamedTuple):
    """Attributes:
    family: ``model_type``.
    settings: fields of transformers' configuration.
    """

    family: str
    settings: dict[str, Any]

    @property
    def is_mixture(self) -> bool:
        return "num_experts_per_tok" in self.settings


def draw(seed: int) -> RandomModel:
    """Even seeds give dense models, odd ones mixtures of experts."""
    rng = random.Random(seed)
    family = rng.choice(MIXTURES if seed % 2 else DENSE)
    kv_heads, layers = rng.choice((1, 1, 2, 3, 5)), rng.randint(1, 4)
    heads = kv_heads * rng.choice((1, 2, 3, 5, 7) if kv_heads < 3 else (1, 2, 3))
    hidden_size = rng.randint(24, 260)
    if family == "llama":
        # transformers refuses other sizes, even where head_dim is given.
        hidden_size = heads * max(1, hidden_size // heads)
    settings: dict[str, Any] = {
        "vocab_size": rng.randint(61, 6007),
        "hidden_size": hidden_size,
        "intermediate_size": rng.randint(17, 400),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * rng.randint(4, 40),
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-5, 1e-6, 3e-6)),
        "rope_parameters": _rope(rng),
        "max_position_embeddings": POSITIONS,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_attention(rng, family, layers),
    }
    if family in MIXTURES:
        settings |= _experts(rng, family, layers)
    return RandomModel(family, settings)


def write_model(model: RandomModel, seed: int, directory: Path) -> Path:
    """A float32 directory. Norms and biases are not at the values at which a fault in them would not show."""
    torch.manual_seed(seed)
    decoder = AutoModelForCausalLM.from_config(AutoConfig.for_model(model.family, **model.settings)).to(torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    decoder.save_pretrained(directory)
    return directory


def _rope(rng: random.Random) -> dict[str, Any]:
    """A rotary embedding; half of them are scaled in one of three ways."""
    rope: dict[str, Any] = {"rope_theta": rng.choice((1e4, 12345.0, 5e5, 1e6))}
    match rng.choice(("default", "default", "default", "linear", "yarn", "llama3")):
        case "linear":
            return {**rope, "rope_type": "linear", "factor": rng.choice((1.5, 2.0, 4.0))}
        case "yarn":
            factor = rng.choice((2.0, 4.0, 8.0))
            original = int(POSITIONS / factor)
            return {**rope, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        case "llama3":
            original = rng.choice((64, 8192, 8192))
            bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {**rope, "rope_type": "llama3", "factor": rng.choice((4.0, 8.0)), **bands}
    return {**rope, "rope_type": "default"}


def _attention(rng: random.Random, family: str, layers: int) -> dict[str, Any]:
    """Windows, shorter or longer than the sequences, and biases."""
    window = rng.randint(3, 60)
    if family in ("mistral", "mixtral"):
        return {"sliding_window": window if rng.random() < 0.3 else None}
    if family == "llama":
        return {"attention_bias": rng.random() < 0.25, "mlp_bias": rng.random() < 0.25}
    if rng.random() < (0.1 if family == "qwen3_moe" else 0.3):
        return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": rng.randint(0, layers - 1)}
    return {"use_sliding_window": False}


def _experts(rng: random.Random, family: str, layers: int) -> dict[str, Any]:
    """One expert whose weight is normalised to 1 is not drawn: the router has no gradient but rounding, which Adam makes as
    large as any, and chooses experts by it a step later."""
    experts = rng.randint(2, 12)
    top_k = rng.randint(1, min(4, experts))
    if family == "mixtral":
        return {"num_experts_per_tok": max(2, top_k), "num_local_experts": experts}
    step = rng.choice((1, 1, 1, min(2, layers)))
    dense = [rng.randrange(layers)] if step == 1 and layers > 1 and rng.random() < 0.2 else []
    return {
        "num_experts_per_tok": top_k,
        "num_experts": experts,
        "moe_intermediate_size": rng.randint(8, 90),
        "norm_topk_prob": rng.random() < 0.7 and top_k > 1,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
    }
