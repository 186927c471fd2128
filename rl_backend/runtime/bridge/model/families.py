"""Fields of ``config.json`` that Megatron-Bridge replaces by the sizes of a released model; refusals of other routing."""

from typing import Any

from rl_backend.contracts import UnsupportedError


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
