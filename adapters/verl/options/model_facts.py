"""Facts about a model, in Megatron's fields: of ``config.json`` and of verl's ``dtype``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Model types: gated DeltaNet in most layers and gated attention in the others; routers, attention or experts of no other
# family; latent attention, with the routers of GLM-4.5; and all that have nothing of _ABSENT apart from that.
_HYBRIDS = frozenset({"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"})
_ROUTED = frozenset({"glm4_moe", "gpt_oss", "minimax_m2"})
_LATENT = frozenset({"deepseek_v3", "glm4_moe_lite", "kimi_k2"})
_FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", *_HYBRIDS, *_ROUTED, *_LATENT})


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_ABSENT: Mapping[str, Any] = {
    **_each(
        """apply_residual_connection_post_layernorm attention_output_gate heterogeneous_block_specs is_hybrid_model
        layernorm_zero_centered_gamma moe_apply_probs_on_input moe_shared_expert_gate mtp_detach_heads mtp_standalone
        mtp_use_repeated_layer multi_latent_attention qk_l2_norm rotary_interleaved use_mup""",
        False,
    ),
    **_each(
        """activation_func_clamp_value experimental_attention_variant linear_attention_freq moe_latent_size
        moe_router_group_topk moe_router_num_groups moe_router_topk_limited_devices moe_router_topk_scaling_factor
        moe_shared_expert_intermediate_size mrope_section mtp_hybrid_override_pattern mtp_num_layers no_rope_freq
        softmax_scale window_attn_skip_freq""",
        None,
    ),
    "glu_linear_offset": 0.0,
    "moe_router_score_function": "softmax",
    "softmax_type": "vanilla",
}
DECIDED = frozenset(
    _each(
        """activation_func add_bias_linear add_qkv_bias ffn_hidden_size gated_linear_unit hidden_size kv_channels
        layernorm_epsilon moe_ffn_hidden_size moe_layer_freq moe_router_pre_softmax moe_router_topk num_attention_heads
        num_layers num_moe_experts num_query_groups qk_layernorm window_size""",
        None,
    )
).union(_ABSENT, ("bf16", "fp16", "params_dtype"))
"""Fields that ``config.json`` and the dtype decide, so that Megatron's default says nothing about them."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model.

    Attributes:
        model_type: of ``config.json``, or of the language model in one that nests it.
        num_layers: 0 where ``config.json`` does not say.
        decided: field of ``DECIDED`` -> its value here; without fields whose value is unknown for this family.
    """

    model_type: str | None
    num_layers: int
    has_experts: bool
    decided: Mapping[str, Any] = field(default_factory=dict)


def model_facts(hf_config: Any, *, has_experts: bool, dtype: str) -> ModelFacts:
    hf_config = text_config(hf_config)
    return ModelFacts(
        getattr(hf_config, "model_type", None),
        getattr(hf_config, "num_hidden_layers", 0),
        has_experts,
        {
            "bf16": dtype == "bfloat16",
            "fp16": False,
            "params_dtype": f"torch.{dtype}",
            **_sizes(hf_config, has_experts),
            **_structure(hf_config, has_experts),
        },
    )


def text_config(hf_config: Any) -> Any:
    """The language model's part of transformers' configuration, where the model also reads images."""
    return getattr(hf_config, "text_config", None) or hf_config


def has_experts(hf_config: Any) -> bool:
    return _num_experts(text_config(hf_config)) is not None


def _num_experts(config: Any) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(filter(None, (getattr(config, name, None) for name in names)), None)


def _sizes(config: Any, has_experts: bool) -> dict[str, Any]:
    heads = getattr(config, "num_attention_heads", None)
    found = {
        "num_layers": getattr(config, "num_hidden_layers", None),
        "hidden_size": getattr(config, "hidden_size", None),
        "num_attention_heads": heads,
        "num_query_groups": getattr(config, "num_key_value_heads", None) or heads,
        "ffn_hidden_size": getattr(config, "intermediate_size", None),
        "kv_channels": _head_size(config),
        "layernorm_epsilon": getattr(config, "rms_norm_eps", None),
    }
    if has_experts:
        found["num_moe_experts"] = _num_experts(config)
        found["moe_router_topk"] = getattr(config, "num_experts_per_tok", None)
        found["moe_ffn_hidden_size"] = getattr(config, "moe_intermediate_size", None)
        if getattr(config, "model_type", None) in ("gpt_oss", "minimax_m2"):
            found["moe_ffn_hidden_size"] = found["ffn_hidden_size"]
    return {name: value for name, value in found.items() if value is not None}


def _head_size(config: Any) -> int | None:
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    # Keys and values of latent attention have different sizes, which Megatron reads elsewhere.
    if getattr(config, "model_type", None) in _LATENT:
        return None
    return getattr(config, "head_dim", None) or (hidden // heads if hidden and heads else None)


def _structure(config: Any, has_experts: bool) -> dict[str, Any]:
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        return {}
    found = {**_ABSENT, "gated_linear_unit": True, "qk_layernorm": kind in ("qwen3", "qwen3_moe", *_HYBRIDS)}
    if kind in _ROUTED:
        return {**found, **_of_routed(config)}
    if kind in _LATENT:
        return {**found, **_of_latent(config, has_experts)}
    if kind in _HYBRIDS:
        found |= _of_hybrid(config)
    biased = bool(getattr(config, "attention_bias", False))
    found["add_qkv_bias"] = biased or kind == "qwen2"
    if not biased and not getattr(config, "mlp_bias", False):
        found["add_bias_linear"] = False
    if getattr(config, "sliding_window", None) is None:
        found["window_size"] = None
    if not has_experts:
        # Without routers these name nothing.
        return {**found, "num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_router_pre_softmax": False}
    if not getattr(config, "mlp_only_layers", None) and getattr(config, "decoder_sparse_step", 1) == 1:
        found["moe_layer_freq"] = 1
    if kind in ("mixtral", "qwen3_5_moe_text") or getattr(config, "norm_topk_prob", False):
        # Megatron's softmax of the chosen scores is the normalised softmax of all.
        found["moe_router_pre_softmax"] = False
    return found


def _of_hybrid(config: Any) -> dict[str, Any]:
    types = list(getattr(config, "layer_types", None) or ())
    first = types.index("full_attention") + 1 if "full_attention" in types else len(types) + 1
    pattern = ["linear_attention" if (layer + 1) % first else "full_attention" for layer in range(len(types))]
    shared = getattr(config, "shared_expert_intermediate_size", None)
    return {
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "layernorm_zero_centered_gamma": True,
        # Megatron takes a number for a periodic pattern, and a list for any other.
        "linear_attention_freq": first if types == pattern else [int(kind == "linear_attention") for kind in types],
        "moe_shared_expert_gate": shared is not None,
        "moe_shared_expert_intermediate_size": shared,
    }


def _of_latent(config: Any, has_experts: bool) -> dict[str, Any]:
    # Its norms are those of latents.
    found: dict[str, Any] = {"multi_latent_attention": True, "qk_layernorm": True, "window_size": None}
    if not getattr(config, "attention_bias", False):
        found |= {"add_bias_linear": False, "add_qkv_bias": False}
    if not has_experts:
        return {**found, "num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_router_pre_softmax": False}
    kinds = getattr(config, "mlp_layer_types", None)
    dense = getattr(config, "first_k_dense_replace", 0)
    layers = range(config.num_hidden_layers)
    return {
        **found,
        **_grouped(config),
        "moe_layer_freq": [int(kinds[layer] == "sparse" if kinds else layer >= dense) for layer in layers],
        "moe_router_score_function": "sigmoid",
    }


def _grouped(config: Any) -> dict[str, Any]:
    """Of a router that chooses within groups, and of shared experts."""
    return {
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * (config.n_shared_experts or 0) or None,
    }


def _of_routed(config: Any) -> dict[str, Any]:
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False, "add_bias_linear": False}
    match config.model_type:
        case "glm4_moe":
            dense = config.first_k_dense_replace
            found = {
                **sigmoid,
                **_grouped(config),
                "add_qkv_bias": bool(config.attention_bias),
                "qk_layernorm": bool(config.use_qk_norm),
                "moe_layer_freq": [int(layer >= dense) for layer in range(config.num_hidden_layers)],
            }
        case "minimax_m2":
            found = {**sigmoid, "add_qkv_bias": False, "qk_layernorm": True, "moe_layer_freq": 1, "window_size": None}
        case _:
            windows = [int(kind == "sliding_attention") for kind in config.layer_types]
            alternating = [int(not layer % 2) for layer in range(len(windows))]
            found = {
                "activation_func_clamp_value": float(getattr(config, "swiglu_limit", 7.0)),
                "add_bias_linear": True,
                "glu_linear_offset": 1.0,
                "moe_layer_freq": 1,
                "moe_router_pre_softmax": False,
                "qk_layernorm": False,
                "softmax_type": "learnable",
                # The token itself is not counted.
                "window_size": (config.sliding_window - 1, 0),
                "window_attn_skip_freq": 2 if windows == alternating else windows,
            }
    return found
