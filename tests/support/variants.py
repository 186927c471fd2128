"""Small directories of the families that are Llama but for fields of their specification."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models import write_tiny

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "gemma": {},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        },
    },
    "granite": {
        "head_dim": None,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.03,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.5,
    },
    "nemotron": {"head_dim": None, "tie_word_embeddings": False, "mlp_bias": True},
    "olmo2": {"head_dim": None, "tie_word_embeddings": False},
    "phi": {"head_dim": None, "tie_word_embeddings": False},
    "starcoder2": {"head_dim": None, "sliding_window": 20},
}
"""Family -> fields that show how it differs."""


def write_variant(family: str, path: Path, **changes: Any) -> Path:
    """As :func:`~tests.support.models.write_tiny`, with the family's own fields."""
    return write_tiny(family, path, **{**VARIANTS[family], **changes})
