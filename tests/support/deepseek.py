"""Small random directories of DeepSeek-V3 and its kin, written by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models import write_tiny

YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": None,
    "tie_word_embeddings": False,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    # Keys of 20 features and values of 12.
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}),
    "deepseek_v3, YaRN, one latent, values wider than keys": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 2,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
            "q_lora_rank": None,
            "v_head_dim": 28,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
        },
    ),
    "deepseek_v3, biases, half-split, tied": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
        },
    ),
    "kimi_k2": ("deepseek_v3", {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-5}),
}


def write_latent(model: str, path: Path, **changes: Any) -> Path:
    """One of ``MODELS``, whose biases of routers are random."""
    written_as, fields = MODELS[model]
    fields = {**SIZES, **fields, **changes}
    if "mlp_layer_types" in fields:
        fields["mlp_layer_types"] = ["dense"] + ["sparse"] * (fields["num_hidden_layers"] - 1)
    write_tiny(written_as, path, **fields)
    if model == "kimi_k2":
        # transformers has no class of this name; Kimi's directories bring DeepSeek's code with them.
        change_config(path, model_type="kimi_k2")
    return path


def change_config(path: Path, **fields: Any) -> None:
    """Sets fields of ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}, indent=2))
