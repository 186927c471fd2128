"""Mixtures of experts over grouped-query attention: Mixtral, Qwen3-MoE, MiniMax-M2, GLM-4.5 and gpt-oss."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.reading import (
    after_dense_layers,
    full_attention,
    in_sparse_layers,
    read_decoder,
    read_layer_types,
    read_router,
    read_sigmoid_mixture,
    weights_behind_layers,
    window_of_every_layer,
    windows_by_layer_type,
    with_draft_layer,
)
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.registry import register_model
from rl_backend.primitive.experts import LIMIT
from rl_backend.primitive.norm import NormSpec


def mixtral(config: HFConfig) -> DecoderSpec:
    """Mixtral 8x7B and 8x22B (Jiang et al., arXiv 2401.04088): experts in every layer, a softmax over the chosen ones."""
    config.require(
        {"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (), "router_jitter_noise": (0, 0.0)}
    )
    windows = full_attention(config) if config.get("sliding_window") is None else window_of_every_layer(config)
    # The same weights as a softmax over the chosen logits, computed as transformers and vLLM do.
    router, names = read_router(config, normalise=True), ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    mixture = MoESpec(router, config.positive_int("intermediate_size"), names)
    return read_decoder(
        config,
        windows,
        [mixture] * len(windows),
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-5)),
        default_theta=1e6,
        default_kv_heads=8,
    )


def qwen3_moe(config: HFConfig) -> DecoderSpec:
    """Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts chosen by a softmax over all of them."""
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)})
    router = read_router(config, normalise=config.flag("norm_topk_prob"))
    feed_forward = in_sparse_layers(config, MoESpec(router, config.positive_int("moe_intermediate_size")))
    return read_decoder(config, windows_by_layer_type(config), feed_forward, default_kv_heads=4, qk_norm=True)


_MINIMAX_HEAD_DIM = 128


_MINIMAX_HONOURED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "router_jitter_noise": (0, 0.0),
    # What transformers knows nothing of: released directories say so, and other values are other models.
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1, 1.0),
    "layernorm_mlp_beta": (1, 1.0),
}


def minimax_m2(config: HFConfig) -> DecoderSpec:
    """MiniMax-M2: one norm over queries, or keys, of all heads, a part of each rotated, sigmoid scores with a bias."""
    config.require(_MINIMAX_HONOURED)
    kinds = config.get("attn_type_list")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        config.refuse("attn_type_list", kinds, "only 1, softmax attention, is implemented")
    windows = full_attention(config)
    # Logits in float32, as vLLM and Megatron compute them; transformers rounds them.
    router = replace(read_router(config, normalise=True), score="sigmoid", expert_bias=True)
    names = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")
    mixture = MoESpec(router, config.positive_int("intermediate_size"), names)
    decoder = read_decoder(
        config,
        windows,
        [mixture] * len(windows),
        default_head_dim=_MINIMAX_HEAD_DIM,
        default_kv_heads=8,
        default_theta=5e6,
        default_rotary_part=_part_of_head(config),
        qk_norm=True,
        joint_qk_norm=True,
    )
    # transformers ignores ``rotary_dim`` and rotates whole heads, unless the parameters have a ``partial_rotary_factor``.
    rotary, rotated = decoder.layers[0].mixer.rotary, config.get("rotary_dim")
    if rotary is not None and rotated not in (None, rotary.head_dim):
        config.refuse("rotary_dim", rotated, f"partial_rotary_factor rotates {rotary.head_dim} features; make them the same")
    return decoder


def glm4_moe(config: HFConfig) -> DecoderSpec:
    """GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): DeepSeek-V3's mixtures after dense layers, half of each head rotated."""
    mixture = read_sigmoid_mixture(config)
    decoder = read_decoder(
        config,
        full_attention(config),
        after_dense_layers(config, mixture, default_dense=1),
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-5)),
        default_kv_heads=8,
        default_theta=10000.0,
        default_rotary_part=0.5,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
    )
    return with_draft_layer(config, decoder, mixture)


def gpt_oss(config: HFConfig) -> DecoderSpec:
    """gpt-oss (arXiv 2508.10925): attention sinks, windows in every second layer, biases everywhere, clamped gates."""
    config.require({"swiglu_limit": (LIMIT,), "router_jitter_noise": (0, 0.0)})
    top_k, other = config.positive_int("num_experts_per_tok", 4), config.get("experts_per_token")
    if other not in (None, top_k):
        config.refuse("experts_per_token", other, f"num_experts_per_tok is {top_k}; make them the same")
    layers, window = range(config.positive_int("num_hidden_layers")), config.positive_int("sliding_window", 128)
    kinds = read_layer_types(config, {"full_attention", "sliding_attention"})
    kinds = kinds or tuple("full_attention" if layer % 2 else "sliding_attention" for layer in layers)
    bias = config.flag("attention_bias", True)
    router = replace(read_router(config, normalise=False), score_after_top_k=True, bias=True, rounded_logits=True)
    mixture = MoESpec(router, config.positive_int("intermediate_size"), ExpertNames(router="router"), clamped=True)
    return read_decoder(
        _with_published_rotary(config),
        [window if kind == "sliding_attention" else None for kind in kinds],
        [mixture] * len(layers),
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-5)),
        default_head_dim=64,
        default_kv_heads=8,
        default_theta=150000.0,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
    )


# Of gpt-oss; transformers takes it where there are no ``rope_parameters``.
_PUBLISHED_ROTARY: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _with_published_rotary(config: HFConfig) -> HFConfig:
    if config.get("rope_parameters") is not None or config.get("rope_scaling") is not None:
        return config
    return HFConfig({**config.fields, "rope_parameters": _PUBLISHED_ROTARY}, config.family)


def _part_of_head(config: HFConfig) -> float:
    head_dim = config.positive_int("head_dim", _MINIMAX_HEAD_DIM)
    rotated = config.positive_int("rotary_dim", head_dim)
    if rotated > head_dim or rotated % 2:
        config.refuse("rotary_dim", rotated, f"expected an even number, at most the {head_dim} features of a head")
    # Rounded up: 44 * (30 / 44) is below 30.
    return min(1.0, math.nextafter(rotated / head_dim, 2.0))


MIXTRAL = decoder_family("mixtral", mixtral)
QWEN3_MOE = decoder_family("qwen3_moe", qwen3_moe)
for family in (
    MIXTRAL,
    QWEN3_MOE,
    decoder_family("glm4_moe", glm4_moe, weights_behind_layers),
    decoder_family("gpt_oss", gpt_oss),
    decoder_family("minimax_m2", minimax_m2),
):
    register_model(family)
