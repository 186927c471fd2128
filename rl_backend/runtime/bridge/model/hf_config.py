"""Megatron-Bridge's provider from ``config.json``: fields it leaves out, models that Megatron would compute differently."""

from collections.abc import Mapping
from typing import Any

from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider

from rl_backend.contracts import UnsupportedError

_YARN_DEFAULTS: Mapping[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""What transformers computes with where ``config.json`` does not say; Megatron-Bridge passes on None."""


def read_provider(bridge: AutoBridge, hf_path: str) -> GPTModelProvider:
    """What Megatron-Bridge makes of ``config.json``, where Megatron computes the same model from it.

    Raises:
        UnsupportedError: it cannot be read, or says what Megatron would ignore.
    """
    indexed = getattr(bridge.hf_pretrained.config, "index_topk", None)
    if indexed is not None:
        # Megatron-Bridge would also train the indexers, with a loss that nobody asked for.
        raise UnsupportedError(
            f"config.json has index_topk={indexed}, sparse attention, which the bridge runtime does not have; the native "
            "runtime may serve it",
            index_topk=indexed,
        )
    try:
        provider = bridge.to_megatron_provider(load_weights=False)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot read the configuration of {hf_path}: {error}; the native runtime may serve it"
        ) from error
    if not isinstance(provider, GPTModelProvider):
        raise UnsupportedError(
            f"Megatron-Bridge builds {hf_path} with {type(provider).__name__}; this runtime trains GPTModelProvider "
            "models only"
        )
    hf_config = bridge.hf_pretrained.config
    complete_provider(hf_config, provider)
    complete_rope(hf_config, provider)
    require_same_model(hf_config, provider)
    return provider


def complete_rope(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge leaves out of rotary embeddings, and Megatron has."""
    kind, rope = _rope(hf_config)
    if rope.get("partial_rotary_factor") is not None:
        provider.rotary_percent = float(rope["partial_rotary_factor"])
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        for name, default in _YARN_DEFAULTS.items():
            if getattr(provider, name) is None:
                setattr(provider, name, default)


def _rope(hf_config: Any) -> tuple[str, dict[str, Any]]:
    """The kind and the parameters of the rotary embedding."""
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    return rope.get("rope_type") or rope.get("type") or "default", rope


def _has_rope(kind: str, rope: Mapping[str, Any], provider: Any) -> bool:
    """Whether Megatron computes the same rotary embedding."""
    latent = bool(provider.multi_latent_attention)
    match kind:
        case "default":
            return True
        case "linear":
            return not latent
        case "yarn":
            # Of heads that rotate in part Megatron's YaRN gives other angles.
            whole = provider.position_embedding_type == "yarn" and provider.rotary_percent == 1.0
            return (_is_yarn_of_latents(rope) if latent else whole) and rope.get("attention_factor") is None
        case "llama3":
            fixed = (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
            return not latent and bool(provider.rope_scaling) and fixed == (1.0, 4.0, 8192)
    return False


def require_same_model(hf_config: Any, provider: Any) -> None:
    """Raises :class:`UnsupportedError` for what Megatron would ignore.

    Args:
        hf_config: transformers' configuration.
        provider: what Megatron-Bridge made of it, completed.
    """
    kind, rope = _rope(hf_config)
    if not _has_rope(kind, rope, provider):
        raise UnsupportedError(
            f"config.json has rope parameters {rope!r}, which Megatron would compute differently or ignore; the native "
            "runtime may serve it",
            rope_type=kind,
        )
    window = getattr(hf_config, "sliding_window", None)
    layers = getattr(hf_config, "layer_types", None) or ()
    slides = window is not None and (any("sliding" in layer for layer in layers) if layers else True)
    if slides and provider.window_size is None:
        raise UnsupportedError(
            f"config.json has sliding_window={window}, which Megatron-Bridge does not pass on; the native runtime may "
            "serve it",
            sliding_window=window,
        )
    _require_experts_everywhere(hf_config, provider)
    require_same_latents(hf_config, provider)
    require_same_routing(hf_config, provider)
    if getattr(hf_config, "norm_topk_prob", None) is False and not provider.moe_router_pre_softmax:
        raise UnsupportedError(
            "config.json has norm_topk_prob=False, which Megatron-Bridge does not pass on: the weights of a token's experts "
            "would add up to 1; the native runtime may serve it",
            norm_topk_prob=False,
        )
    if getattr(provider, "use_mup", False):
        raise UnsupportedError("the model scales its logits (MuP); the bridge runtime does not")


def _is_yarn_of_latents(rope: Mapping[str, Any]) -> bool:
    """Whether Megatron's latent attention has all of a YaRN embedding; of two scales transformers takes both or none."""
    return bool(rope.get("mscale")) == bool(rope.get("mscale_all_dim")) and rope.get("truncate") is not False


def _require_experts_everywhere(hf_config: Any, provider: Any) -> None:
    """Refuses layers without experts between layers with experts: Megatron-Bridge gives experts to both."""
    step, listed = getattr(hf_config, "decoder_sparse_step", None) or 1, getattr(hf_config, "mlp_only_layers", None) or []
    dense = [layer for layer in range(provider.num_layers) if layer in listed or (layer + 1) % step]
    if provider.num_moe_experts is not None and dense and provider.moe_layer_freq == 1:
        raise UnsupportedError(
            f"config.json: decoder_sparse_step={step}, mlp_only_layers={list(listed)}: layers {dense} have no experts, and "
            "Megatron-Bridge gives experts to every layer; the native runtime may serve it",
            layers=dense,
        )


def complete_provider(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge takes as it is in released models.

    Args:
        hf_config: transformers' configuration.
        provider: what Megatron-Bridge made of it.

    Raises:
        UnsupportedError: sizes with which it would misread weights.
    """
    if hf_config.model_type in ("glm4_moe", "gpt_oss"):
        provider.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
    match hf_config.model_type:
        case "glm4_moe" | "glm4_moe_lite":
            shared = getattr(hf_config, "n_shared_experts", None) or 1
            provider.moe_shared_expert_intermediate_size = hf_config.moe_intermediate_size * shared
            kinds = getattr(hf_config, "mlp_layer_types", None)
            if kinds is not None:
                provider.moe_layer_freq = [int(kind == "sparse") for kind in kinds]
        case "gpt_oss":
            if hf_config.hidden_size == 2 * hf_config.intermediate_size:
                raise UnsupportedError(
                    f"config.json has hidden_size={hf_config.hidden_size}, twice intermediate_size="
                    f"{hf_config.intermediate_size}: Megatron-Bridge tells experts from their transposes by their shape, "
                    "and cannot here; the native runtime may serve it",
                    hidden_size=hf_config.hidden_size,
                )
            rope = hf_config.rope_parameters
            if rope.get("rope_type") != "yarn":
                raise UnsupportedError(
                    f"config.json has rope parameters {rope!r}: Megatron-Bridge gives every gpt_oss YaRN; the native "
                    "runtime may serve it",
                    rope_type=rope.get("rope_type"),
                )
            provider.yarn_rotary_scaling_factor = float(rope["factor"])
            provider.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
            provider.yarn_beta_fast = float(rope.get("beta_fast") or 32.0)
            provider.yarn_beta_slow = float(rope.get("beta_slow") or 1.0)
            provider.yarn_correction_range_round_to_int = rope.get("truncate", True)
            provider.window_attn_skip_freq = [int("sliding" in kind) for kind in hf_config.layer_types]
            provider.activation_func_clamp_value = float(getattr(hf_config, "swiglu_limit", 7.0))


def require_same_latents(hf_config: Any, provider: Any) -> None:
    """Refuses latent attention that Megatron would rotate differently, and heads that its models of it do not share.

    Raises:
        UnsupportedError: names the field.
    """
    if not provider.multi_latent_attention:
        return
    if getattr(hf_config, "rope_interleave", True) is False:
        raise UnsupportedError(
            "config.json has rope_interleave=False: Megatron's latent attention rotates neighbouring features, the model "
            "halves; the native runtime may serve it",
            rope_interleave=False,
        )
    if hf_config.tie_word_embeddings and not provider.share_embeddings_and_output_weights:
        raise UnsupportedError(
            "config.json has tie_word_embeddings=True: Megatron-Bridge's models with latent attention have a head of their "
            "own; the native runtime may serve it",
            tie_word_embeddings=True,
        )


def require_same_routing(hf_config: Any, provider: Any) -> None:
    """Refuses routers with sigmoid scores that Megatron would have choose other experts or weigh them differently.

    Megatron scores a group of experts by its ``k // topk_group`` highest, the published rule by its two highest; and it
    normalises weights where there are several experts, whatever ``norm_topk_prob`` says.

    Raises:
        UnsupportedError: names the fields.
    """
    if provider.num_moe_experts is None or provider.moe_router_score_function != "sigmoid":
        return
    groups, chosen, top_k = provider.moe_router_num_groups, provider.moe_router_group_topk, provider.moe_router_topk
    if groups and chosen and chosen < groups and top_k != 2 * chosen:
        raise UnsupportedError(
            f"config.json has n_group={groups}, topk_group={chosen}, num_experts_per_tok={top_k}: Megatron scores a group "
            f"by its num_experts_per_tok // topk_group = {top_k // chosen} best experts, the model by its two best; the "
            "native runtime may serve it, or set num_experts_per_tok to twice topk_group",
            n_group=groups,
            topk_group=chosen,
        )
    normalised = getattr(hf_config, "norm_topk_prob", None) is not False
    if normalised != (top_k > 1):
        raise UnsupportedError(
            f"config.json has norm_topk_prob={normalised} and num_experts_per_tok={top_k}: Megatron normalises the "
            "weights of several experts, and never that of one; the native runtime may serve it",
            norm_topk_prob=normalised,
            num_experts_per_tok=top_k,
        )
