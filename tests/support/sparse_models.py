"""Tiny DeepSeek-V3.2 and GLM-5 directories, and transformers' GLM-5 with the rotations that their reference code has.

transformers 5.10 has no DeepSeek-V3.2, and rotates halves in all of GLM-5. Released models rotate neighbours in their
attention; indexers rotate neighbours in GLM-5 and halves in DeepSeek-V3.2. Both families are otherwise one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOP_K = 6
KINDS = {"glm_moe_dsa": ["full", "shared", "full", "shared"], "deepseek_v32": ["full"] * 4}


def write_sparse(path: Path, model_type: str, *, mtp: bool = False, **changes: Any) -> Path:
    """A random directory of one of the families: four layers, of which the first is dense; 16 index heads, hardly any ties.

    Args:
        mtp: with a layer for multi-token prediction.
    """
    kinds = changes.pop("indexer_types", KINDS[model_type])
    layers = len(kinds)
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
        "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16,
        "index_topk": TOP_K, "index_head_dim": 16, "index_n_heads": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "bos_token_id": None, "eos_token_id": 1,
        "num_hidden_layers": layers, "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1), "first_k_dense_replace": 1,
        "indexer_types": kinds,
        **changes,
    }  # fmt: skip
    torch.manual_seed(3)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**sizes)).float()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.copy_(1.0 + 0.2 * torch.randn_like(tensor))
            elif name.endswith(("norm.bias", "e_score_correction_bias")):
                tensor.copy_(0.1 * torch.randn_like(tensor))
            elif tensor.dim() > 1:
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.5)
    model.save_pretrained(path, max_shard_size="10GB")
    tensors = load_file(path / "model.safetensors")
    following = tuple(f"model.layers.{layer}.self_attn.indexer." for layer, kind in enumerate(kinds) if kind == "shared")
    tensors = {name: tensor for name, tensor in tensors.items() if not (following and name.startswith(following))}
    config = json.loads((path / "config.json").read_text())
    if mtp:
        tensors |= _mtp_tensors(tensors, layers, sizes["hidden_size"])
        config["num_nextn_predict_layers"] = 1
    if model_type == "deepseek_v32":
        left_out = ("indexer_types", "mlp_layer_types", "layer_types")
        config = {name: value for name, value in config.items() if name not in left_out}
        config |= {"model_type": model_type, "architectures": ["DeepseekV32ForCausalLM"], "first_k_dense_replace": 1}
        config |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def _mtp_tensors(tensors: dict[str, Tensor], layers: int, hidden: int) -> dict[str, Tensor]:
    """A decoder layer as the last that has an indexer, and what is around it."""
    full = max(int(name.split(".")[2]) for name in tensors if ".indexer." in name)
    source, module = f"model.layers.{full}.", f"model.layers.{layers}."
    made = {module + name.removeprefix(source): value * 1.05 for name, value in tensors.items() if name.startswith(source)}
    made |= {f"{module}{norm}.weight": 1.0 + 0.1 * torch.randn(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{module}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
    made[f"{module}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    made[f"{module}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return made


@contextmanager
def reference(path: Path) -> Iterator[nn.Module]:
    """transformers' model of a directory of either family, with its eager attention, which alone is causal."""
    config = json.loads((path / "config.json").read_text())
    # What a layer that follows has of an indexer is never used.
    model = GlmMoeDsaForCausalLM.from_pretrained(
        path, config=GlmMoeDsaConfig(**as_glm(config)), attn_implementation="eager", dtype=torch.float32
    )
    with corrected_rotations(config["model_type"]):
        yield model


def as_glm(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``config.json`` of either family as transformers' GLM-5 reads them."""
    layers = config["num_hidden_layers"]
    dense = config.get("first_k_dense_replace", 0)
    kinds_of_mlp = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (layers - dense)
    kinds = config.get("indexer_types", ["full"] * layers)
    return {**config, "model_type": "glm_moe_dsa", "indexer_types": kinds, "mlp_layer_types": kinds_of_mlp}


@contextmanager
def corrected_rotations(model_type: str) -> Iterator[None]:
    """transformers' GLM-5 rotates as released models of ``model_type`` do, as newer releases do themselves for GLM-5."""
    if hasattr(modeling_glm_moe_dsa, "apply_rotary_pos_emb_interleave"):
        with indexers_that_rotate_halves(modeling_glm_moe_dsa) if model_type == "deepseek_v32" else nullcontext():
            yield
        return
    original = modeling_glm_moe_dsa.apply_rotary_pos_emb

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        of_indexer = unsqueeze_dim == 2
        if model_type == "glm_moe_dsa" or not of_indexer:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return original(x, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]

    modeling_glm_moe_dsa.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        modeling_glm_moe_dsa.apply_rotary_pos_emb = original


@contextmanager
def indexers_that_rotate_halves(modeling: Any) -> Iterator[None]:
    original = modeling.apply_rotary_pos_emb_interleave

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        of_indexer = unsqueeze_dim == 2
        return (apply_rotary_pos_emb if of_indexer else original)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    modeling.apply_rotary_pos_emb_interleave = rotate
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb_interleave = original


def reference_log_probs(model: nn.Module, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Of each sequence alone."""
    return [
        model(ids[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0] for ids in sequences
    ]
