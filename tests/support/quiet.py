"""A model whose layers add nothing, so that what it rounds is rounded by its ends alone."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import write_tiny_qwen3


def write_quiet(path: Path, *, tied: bool) -> Path:
    """Embeddings are numbers of bfloat16: a residual stream in bfloat16 has them as they are."""
    write_tiny_qwen3(path, max_shard_size="1GB", tie_word_embeddings=tied)
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("embed_tokens.weight"):
            weight.copy_(weight.to(torch.bfloat16))
    save_file(weights, file, metadata={"format": "pt"})
    return path
