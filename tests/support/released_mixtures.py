"""Small random directories of mixtures of experts with the names and fields of released ones, of sizes that vLLM serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

_SHARED: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_EXPERTS: Mapping[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    # Where all implementations agree: some give the norms of latents 1e-6 whatever this says.
    "rms_norm_eps": 1e-6,
    "rope_parameters": PLAIN,
    **_EXPERTS,
    "n_group": 4,
    "topk_group": 2,
}
_GROUPED: Mapping[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}
_HALF = {**PLAIN, "partial_rotary_factor": 0.5}
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "glm4_moe": {
        **_GROUPED,
        **_EXPERTS,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "rope_parameters": _HALF,
    },
    "minimax_m2": {
        **_GROUPED,
        "intermediate_size": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "rope_parameters": _HALF,
    },
    "gpt_oss": {
        **_GROUPED,
        # Other than the hidden size, half of it too: experts are transposed, and Megatron-Bridge goes by their shapes.
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {**YARN, "truncate": False},
    },
}
_SPARSE: Mapping[str, Any] = {"index_topk": 256, "index_n_heads": 2, "index_head_dim": 128}
_AS_V3: Mapping[str, Mapping[str, Any]] = {
    "kimi_k2": {"architectures": ["DeepseekV3ForCausalLM"]},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], **_SPARSE},
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"], **_SPARSE, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
"""Types whose directories are one of DeepSeek-V3 with these fields, and indexers where ``index_topk`` is one of them."""


def write_mixture(path: Path, model_type: str, seed: int = 0, **fields: Any) -> Path:
    """A random float32 model; ``fields`` are of transformers' configuration."""
    known = model_type if model_type in _FIELDS else "deepseek_v3"
    config = AutoConfig.for_model(known, **{**_SHARED, **_FIELDS[known], **fields})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    randomise(model, seed)
    model.save_pretrained(path)
    if known != model_type:
        _rewrite(path, model_type, config)
    return path


def randomise(model: nn.Module, seed: int) -> None:
    """Gives every weight a value at which a mistake shows: norms, biases, sinks, what routers choose by."""
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, each) for name, each in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *biases]:
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.1 * noise)
            else:
                scale = (
                    0.1 if name.endswith("e_score_correction_bias") else 0.2 if name.endswith(("bias", "sinks")) else 0.06
                )
                tensor.copy_(scale * noise)


def _rewrite(path: Path, model_type: str, config: Any) -> None:
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"model_type": model_type} | dict(_AS_V3[model_type])))
    if "index_topk" not in _AS_V3[model_type]:
        return
    weights, heads = load_file(path / "model.safetensors"), _SPARSE["index_n_heads"]
    for layer in range(config.num_hidden_layers):
        shapes = {
            "wq_b.weight": (heads * 128, config.q_lora_rank),
            "wk.weight": (128, config.hidden_size),
            "k_norm.weight": (128,),
            "k_norm.bias": (128,),
            "weights_proj.weight": (heads, config.hidden_size),
        }
        weights |= {f"model.layers.{layer}.self_attn.indexer.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
