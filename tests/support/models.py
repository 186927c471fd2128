"""Small Hugging Face model directories for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def write_tiny_qwen3(path: Path, *, seed: int = 0, max_shard_size: str = "100KB", **changes: Any) -> Path:
    """As :func:`write_tiny` for Qwen3."""
    return write_tiny("qwen3", path, seed=seed, max_shard_size=max_shard_size, **changes)


def write_tiny(model_type: str, path: Path, *, seed: int = 0, max_shard_size: str = "100KB", **changes: Any) -> Path:
    """A random float32 decoder of about 0.1M parameters in several safetensors files; head_dim 32 is the least on CPU vLLM.

    Args:
        changes: fields of transformers' configuration; None leaves out one that is set here.
    """
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
    left_out = {name for name in settings if changes.get(name, "") is None}
    fields = {name: value for name, value in {**settings, **changes}.items() if name not in left_out}
    config = AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith((".bias", "proj_bias")):
                parameter.copy_(0.2 * torch.randn_like(parameter))
            elif name.endswith(".sinks"):
                parameter.normal_()
            else:
                parameter.mul_(4.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path
