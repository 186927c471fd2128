"""Facts about a model, in Megatron's fields: of ``config.json``, as Megatron-Bridge reads it, and of verl's ``dtype``."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

OF_DTYPE = frozenset({"bf16", "fp16", "params_dtype"})
_OF_CONFIG = """
activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm
attention_output_gate experimental_attention_variant ffn_hidden_size gated_linear_unit glu_linear_offset
heterogeneous_block_specs hidden_size is_hybrid_model kv_channels layernorm_epsilon layernorm_zero_centered_gamma
linear_attention_freq moe_apply_probs_on_input moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_group_topk
moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_limited_devices
moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size mrope_section mtp_detach_heads
mtp_hybrid_override_pattern mtp_num_layers mtp_standalone mtp_use_repeated_layer multi_latent_attention no_rope_freq
num_attention_heads num_layers num_moe_experts num_query_groups qk_l2_norm qk_layernorm rotary_interleaved softmax_scale
softmax_type use_mup window_attn_skip_freq window_size
"""
DECIDED = OF_DTYPE.union(_OF_CONFIG.split())
"""Fields that ``config.json`` and the dtype decide, so that Megatron's default says nothing about them."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a language model; ``hf_config`` is transformers' configuration of it, ``dtype`` the engine's."""

    hf_config: Any
    dtype: str

    @property
    def model_type(self) -> str | None:
        return getattr(self.hf_config, "model_type", None)

    @property
    def num_layers(self) -> int:
        return getattr(self.hf_config, "num_hidden_layers", 0)

    @property
    def has_experts(self) -> bool:
        return has_experts(self.hf_config)

    @property
    def of_dtype(self) -> Mapping[str, Any]:
        return {"bf16": self.dtype == "bfloat16", "fp16": False, "params_dtype": f"torch.{self.dtype}"}

    @cached_property
    def of_config(self) -> Mapping[str, Any]:
        """The other fields of ``DECIDED``; none of a model that Megatron-Bridge does not have.

        Raises:
            UnsupportedError: Megatron is not installed.
        """
        from rl_backend.runtime.bridge.installed import import_megatron, quiet

        import_megatron()
        from megatron.bridge import AutoBridge
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        from rl_backend.runtime.bridge.model.provider import complete_provider

        config = copy.deepcopy(self.hf_config)
        # Directories of critics, and of models that also read images, name another class.
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]
        try:
            with quiet():
                provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
            return {}
        complete_provider(config, provider)
        found = {name: getattr(provider, name) for name in DECIDED - OF_DTYPE if hasattr(provider, name)}
        found["activation_func"] = found["activation_func"].__name__
        # As Megatron itself fills in what is left out.
        if found["num_moe_experts"] is not None:
            found["moe_ffn_hidden_size"] = found["moe_ffn_hidden_size"] or found["ffn_hidden_size"]
        found["kv_channels"] = found["kv_channels"] or found["hidden_size"] // found["num_attention_heads"]
        if found["multi_latent_attention"]:
            # Keys and values of latent attention have different sizes, which Megatron reads elsewhere.
            del found["kv_channels"]
        return found | {name: layers_or_period(found[name]) for name in ("linear_attention_freq", "window_attn_skip_freq")}


def layers_or_period(layers: Any) -> Any:
    """Megatron's number for a periodic pattern of layers, of which the last is another; any other pattern as it is."""
    if not isinstance(layers, Sequence):
        return layers
    period = layers.index(0) + 1 if 0 in layers else len(layers) + 1
    return period if list(layers) == [int((layer + 1) % period != 0) for layer in range(len(layers))] else list(layers)


def text_config(hf_config: Any) -> Any:
    """The language model's part of transformers' configuration, where the model also reads images."""
    return getattr(hf_config, "text_config", None) or hf_config


def has_experts(hf_config: Any) -> bool:
    config = text_config(hf_config)
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
