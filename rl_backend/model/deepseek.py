"""DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash: latent attention, and mixtures of experts behind a few dense layers."""

from dataclasses import replace
from typing import NamedTuple

from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families import full_attention, read_decoder
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.mla import MLASpec
from rl_backend.model.registry import register_model
from rl_backend.model.sigmoid_mixtures import (
    after_dense_layers,
    read_sigmoid_mixture,
    sigmoid_mixture_family,
    with_draft_layer,
)
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary, YarnScaling, yarn_temperature

_LATENT_EPS = 1e-6
"""Of the norms of latents, in DeepSeek's code and in transformers, whatever ``rms_norm_eps`` says. vLLM and Megatron take
``rms_norm_eps``, which is the same number in DeepSeek-V3 and Kimi-K2."""


class LatentDefaults(NamedTuple):
    """What fields are that ``config.json`` leaves out: those of the family's class in transformers, which engines read.

    Attributes:
        groups: ``n_group`` and ``topk_group``.
        dense: ``first_k_dense_replace``.
        scale: ``routed_scaling_factor``.
        eps: ``rms_norm_eps``.
        query_rank: ``q_lora_rank``, where null is a projection without a latent.
    """

    groups: tuple[int, int]
    dense: int
    scale: float
    eps: float
    query_rank: int


def deepseek_v3(config: HFConfig) -> DecoderSpec:
    """DeepSeek-V3 and R1 (arXiv 2412.19437)."""
    return latent_decoder(config, LatentDefaults(groups=(8, 4), dense=3, scale=2.5, eps=1e-6, query_rank=1536))


def glm4_moe_lite(config: HFConfig) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek-V3 with other sizes; ``mlp_layer_types`` names the dense layers."""
    return latent_decoder(config, LatentDefaults(groups=(1, 1), dense=1, scale=1.8, eps=1e-5, query_rank=768))


def latent_decoder(config: HFConfig, defaults: LatentDefaults) -> DecoderSpec:
    """A decoder of latent attention and, behind ``first_k_dense_replace`` layers, mixtures."""
    config.require({"mlp_bias": (False,)})
    heads, rotated = config.positive_int("num_attention_heads"), config.positive_int("qk_rope_head_dim", 64)
    mixture = read_sigmoid_mixture(config, default_groups=defaults.groups, default_scale=defaults.scale)
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim", rotated)
    if kv_heads != heads:
        config.refuse("num_key_value_heads", kv_heads, f"all num_attention_heads={heads} have keys of their own")
    if head_dim != rotated:
        config.refuse("head_dim", head_dim, f"stands for what is rotated here; leave it out, or make it {rotated}")
    decoder = read_decoder(
        # What is rotated is all that is read of a head.
        HFConfig({**config.fields, "head_dim": rotated}, config.family),
        full_attention(config),
        after_dense_layers(config, mixture, default_dense=defaults.dense),
        norm=NormSpec(config.positive_float("rms_norm_eps", defaults.eps)),
        default_theta=10000.0,
    )
    rotary = decoder.layers[0].mixer.rotary
    assert rotary is not None, "of read_decoder"
    mixer = _read_mla(config, heads, rotary, defaults.query_rank)
    layers = tuple(layer._replace(mixer=mixer) for layer in decoder.layers)
    return with_draft_layer(config, replace(decoder, layers=layers), mixture)


def _read_mla(config: HFConfig, heads: int, rotary: Rotary, default_query_rank: int) -> MLASpec:
    plain = config.positive_int("qk_nope_head_dim")
    key_dim = plain + rotary.head_dim
    config.require({"qk_head_dim": (key_dim,)})
    without = config.fields.get("q_lora_rank", default_query_rank) is None
    rank = None if without else config.positive_int("q_lora_rank", default_query_rank)
    return MLASpec(
        num_heads=heads,
        query_rank=rank,
        kv_rank=config.positive_int("kv_lora_rank"),
        plain_dim=plain,
        value_dim=config.positive_int("v_head_dim"),
        rotary=rotary,
        interleaved=config.flag("rope_interleave", True),
        scale=key_dim**-0.5 * _temperature(config, rotary) ** 2,
        latent_eps=_LATENT_EPS,
        bias=config.flag("attention_bias"),
    )


def _temperature(config: HFConfig, rotary: Rotary) -> float:
    """What DeepSeek's YaRN multiplies queries by, and keys; ``mscale_all_dim`` is checked with the rotary embedding."""
    parameters = config.get("rope_parameters", config.get("rope_scaling", {}))
    if not isinstance(rotary.scaling, YarnScaling) or not parameters.get("mscale_all_dim"):
        return 1.0
    return yarn_temperature(rotary.scaling.factor, float(parameters["mscale_all_dim"]))


for family in (
    sigmoid_mixture_family("deepseek_v3", deepseek_v3),
    sigmoid_mixture_family("kimi_k2", deepseek_v3),
    sigmoid_mixture_family("glm4_moe_lite", glm4_moe_lite),
):
    register_model(family)
