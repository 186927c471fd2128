"""Tiny models with mixtures of experts, and transformers' names for the gradients of packed experts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_backend.contracts import WeightName, stored_tensors
from tests.support.models import write_tiny

MINIMAX_ROTARY: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
"""As ``rotary_dim`` = 16 of the 32 features of a head, a field that transformers ignores."""
GPT_OSS_ROTARY: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "qwen3_moe, weights not normalised": ("qwen3_moe", {"num_experts": 4, "norm_topk_prob": False}),
    "qwen3_moe, dense layers between": (
        "qwen3_moe",
        {"num_experts": 6, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen3_moe, experts without tokens": ("qwen3_moe", {"num_experts": 64, "num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "intermediate_size": 48}),
    "mixtral, window of 20, untied": (
        "mixtral",
        {"num_local_experts": 3, "intermediate_size": 48, "sliding_window": 20, "tie_word_embeddings": False},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
        },
    ),
    "glm4_moe, no biases, no norms, two shared experts": (
        "glm4_moe",
        {"n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False},
    ),
    "minimax_m2": (
        "minimax_m2",
        {"num_local_experts": 6, "intermediate_size": 48, "rope_parameters": MINIMAX_ROTARY, "tie_word_embeddings": False},
    ),
}

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "intermediate_size": 48,
            "sliding_window": 20,
            "rope_parameters": GPT_OSS_ROTARY,
            "tie_word_embeddings": False,
        },
    ),
}
"""As ``MODELS``, with one tensor for all experts in directories as in memory."""


def write_moe(model: str, path: Path, **changes: Any) -> Path:
    """One of ``MODELS`` or ``PACKED``, two experts a token and three layers unless it says otherwise."""
    family, settings = {**MODELS, **PACKED}[model]
    base = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    if family in ("mixtral", "minimax_m2", "gpt_oss"):
        base.pop("moe_intermediate_size")
    return write_tiny(family, path, **{**base, **settings, **changes})


def gradients_in_transformers_names(native: nn.Module) -> dict[str, Tensor]:
    """Gradients of a native model under the names and in the shapes that transformers' parameters have in memory."""
    gradients = {}
    for name, parameter in native.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        name = name if name == "lm_head.weight" else f"model.{name}".replace(".shared_expert.", ".shared_experts.")
        gradients[name] = parameter.grad.flatten(1, 2) if name.endswith("experts.gate_up_proj") else parameter.grad
    return gradients


def unpacked(names: Mapping[str, WeightName], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The Hugging Face tensors in whole parameters."""
    return {stored: tensors[parameter][index] for parameter, name in names.items() for index, stored in stored_tensors(name)}


def upcycle(dense: Path, path: Path, num_experts: int = 4) -> Path:
    """A Qwen3-MoE directory that computes what the Qwen3 in ``dense`` does: each expert is a copy of its feed-forward block.

    Komatsuzaki et al., arXiv 2212.05055. Two experts a token, whose weights add up to 1; routers are random.
    """
    shutil.copytree(dense, path, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    config |= {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": config["intermediate_size"]}
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    stored = [item for file in dense.glob("*.safetensors") for item in load_file(file).items()]
    tensors = {}
    for name, tensor in stored:
        block, is_feed_forward, projection = name.partition(".mlp.")
        if not is_feed_forward:
            tensors[name] = tensor
            continue
        router = torch.randn(num_experts, config["hidden_size"], generator=generator)
        tensors.setdefault(f"{block}.mlp.gate.weight", router)
        tensors |= {f"{block}.mlp.experts.{expert}.{projection}": tensor.clone() for expert in range(num_experts)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
