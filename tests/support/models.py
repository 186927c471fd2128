"""Small Hugging Face model directories for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def write_tiny_qwen3(path: Path, *, seed: int = 0, max_shard_size: str = "100KB", **changes: Any) -> Path:
    """A random float32 Qwen3 of about 0.1M parameters in several safetensors files; head_dim 32 is the least on CPU vLLM."""
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    config = Qwen3Config(**{**settings, **changes})
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path
