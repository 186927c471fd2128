"""Dense decoders: Llama, Mistral, Qwen2, Qwen3, Gemma, Granite, OLMo 2, StarCoder 2, Phi and Nemotron."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_backend.model.blocks import LayerNorms, LayerSpec
from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.reading import (
    full_attention,
    read_activation,
    read_decoder,
    read_layer_types,
    swiglu_in_every_layer,
    window_of_every_layer,
    windows_by_layer_type,
)
from rl_backend.model.feedforward.dense import MLPNames, MLPSpec
from rl_backend.model.hf_config import HFConfig, read_rotary
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.registry import register_model
from rl_backend.primitive.norm import NormSpec


def qwen2(config: HFConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5 (arXiv 2407.10671): biases in the projections of queries, keys and values."""
    config.require({"attention_bias": (True,), "mlp_bias": (False,)})
    windows, feed_forward = windows_by_layer_type(config), swiglu_in_every_layer(config)
    return read_decoder(config, windows, feed_forward, default_kv_heads=32, qkv_bias=True)


def qwen3(config: HFConfig) -> DecoderSpec:
    """Dense Qwen3 (arXiv 2505.09388): normalised queries and keys; transformers 4.51 or later."""
    config.require({"attention_bias": (False,), "mlp_bias": (False,)})
    windows, feed_forward = windows_by_layer_type(config), swiglu_in_every_layer(config)
    return read_decoder(config, windows, feed_forward, default_head_dim=128, default_kv_heads=32, qk_norm=True)


def llama(config: HFConfig) -> DecoderSpec:
    """Llama 1 to 3 (Touvron et al., arXiv 2302.13971, 2307.09288; Grattafiori et al., arXiv 2407.21783)."""
    config.require({"rope_interleaved": (False,)})
    bias, feed_forward = config.flag("attention_bias"), swiglu_in_every_layer(config, bias=config.flag("mlp_bias"))
    # Directories of Llama 1 and 2 have no rope_theta.
    return read_decoder(config, full_attention(config), feed_forward, default_theta=10000.0, qkv_bias=bias, output_bias=bias)


def mistral(config: HFConfig) -> DecoderSpec:
    """Mistral 7B and Nemo (Jiang et al., arXiv 2310.06825): one sliding window for all layers, or none."""
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": ()})
    windows, feed_forward = window_of_every_layer(config), swiglu_in_every_layer(config)
    return read_decoder(config, windows, feed_forward, default_theta=10000.0, default_kv_heads=8)


# transformers' names of GELU's tanh form. An exact GELU is refused for Gemma: transformers computes it, vLLM the tanh form.
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new")
_OF_GEMMA: Mapping[str, tuple[Any, ...]] = {
    "hidden_activation": GELU_TANH,
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False,),
}


def gemma(config: HFConfig) -> DecoderSpec:
    """Gemma 1 (arXiv 2403.08295): GELU gates, norms stored as differences from 1, embeddings times sqrt(hidden_size)."""
    config.require(_OF_GEMMA)
    decoder = read_decoder(
        config,
        full_attention(config),
        swiglu_in_every_layer(config, activation="gelu_tanh"),
        activations=GELU_TANH,
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-6), from_one=True),
        default_head_dim=256,
        default_kv_heads=16,
        default_theta=10000.0,
        default_tied=True,
    )
    return replace(decoder, embedding_scale=decoder.hidden_size**0.5)


def gemma3_text(config: HFConfig) -> DecoderSpec:
    """Gemma 3's language models (arXiv 2503.19786): norms around both blocks and of queries and keys, windows and angles."""
    config.require({**_OF_GEMMA, "attn_logit_softcapping": (), "final_logit_softcapping": ()})
    layers, step = range(config.positive_int("num_hidden_layers")), config.positive_int("sliding_window_pattern", 6)
    kinds = read_layer_types(config, {"full_attention", "sliding_attention"})
    kinds = kinds or tuple("sliding_attention" if (layer + 1) % step else "full_attention" for layer in layers)
    window = config.positive_int("sliding_window", 4096)
    whole, near = _rotary_by_kind(config)
    decoder = read_decoder(
        whole,
        [window if kind == "sliding_attention" else None for kind in kinds],
        swiglu_in_every_layer(config, activation="gelu_tanh"),
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-6), from_one=True),
        default_head_dim=256,
        default_kv_heads=4,
        default_theta=1e6,
        default_tied=True,
        qk_norm=True,
        scale=config.positive_float("query_pre_attn_scalar", 256.0) ** -0.5,
    )

    def with_angles(layer: LayerSpec, kind: str) -> LayerSpec:
        assert isinstance(layer.mixer, GQASpec), "of read_decoder"
        if kind == "full_attention":
            return layer
        return layer._replace(mixer=replace(layer.mixer, rotary=read_rotary(near, layer.mixer.head_dim, 10000.0).rotary))

    return replace(
        decoder,
        # A linear scaling does not lengthen Gemma's positions, which count with it.
        max_length=config.positive_int("max_position_embeddings"),
        layers=tuple(with_angles(layer, kind) for layer, kind in zip(decoder.layers, kinds, strict=True)),
        norms=LayerNorms(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
        embedding_scale=decoder.hidden_size**0.5,
    )


def _rotary_by_kind(config: HFConfig) -> tuple[HFConfig, HFConfig]:
    """The configuration as layers with whole attention and those with a window read their rotary embedding from it."""
    # transformers 5 writes ``rope_parameters`` for each kind, earlier versions ``rope_local_base_freq``.
    parameters = config.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        whole, near = parameters["full_attention"], parameters.get("sliding_attention")
    else:
        whole, near = parameters, {"rope_theta": config.get("rope_local_base_freq", 10000.0)}
    both = {**config.fields, "rope_parameters": whole}
    return (
        HFConfig(both, config.family),
        HFConfig({**both, "rope_scaling": None, "rope_theta": None, "rope_parameters": near}, config.family),
    )


def granite(config: HFConfig) -> DecoderSpec:
    """Granite 3 (IBM): Llama with factors for embeddings, scores, what blocks add and logits."""
    bias, feed_forward = config.flag("attention_bias"), swiglu_in_every_layer(config, bias=config.flag("mlp_bias"))
    decoder = read_decoder(
        config,
        full_attention(config),
        feed_forward,
        default_theta=10000.0,
        qkv_bias=bias,
        output_bias=bias,
        scale=config.positive_float("attention_multiplier", 1.0),
    )
    return replace(
        decoder,
        embedding_scale=config.positive_float("embedding_multiplier", 1.0),
        residual_scale=config.positive_float("residual_multiplier", 1.0),
        logit_scale=1.0 / config.positive_float("logits_scaling", 1.0),
    )


def olmo2(config: HFConfig) -> DecoderSpec:
    """OLMo 2 (arXiv 2501.00656): norms after the blocks only, and one over the queries, or the keys, of all heads."""
    config.require({"mlp_bias": (False,), "clip_qkv": ()})
    bias = config.flag("attention_bias")
    decoder = read_decoder(
        config,
        full_attention(config),
        swiglu_in_every_layer(config),
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-5)),
        default_theta=10000.0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
    )
    return replace(decoder, norms=LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"))


def starcoder2(config: HFConfig) -> DecoderSpec:
    """StarCoder 2 (arXiv 2402.19173): layer norms, feed-forward blocks without a gate, biases everywhere."""
    config.require({"residual_dropout": (0, 0.0), "embedding_dropout": (0, 0.0)})
    config.require({"norm_type": ("layer_norm",), "mlp_type": ("default",)})
    bias = config.flag("use_bias", True)
    return read_decoder(
        config,
        window_of_every_layer(config, None),
        mlp_in_every_layer(config, "gelu_pytorch_tanh", MLPNames("c_fc", "c_proj"), bias=bias),
        activations=GELU_TANH,
        norm=layer_norm(config, "norm_epsilon"),
        default_kv_heads=2,
        default_theta=10000.0,
        default_tied=True,
        qkv_bias=bias,
        output_bias=bias,
    )


def phi(config: HFConfig) -> DecoderSpec:
    """Phi 1, 1.5 and 2 (arXiv 2306.11644, 2309.05463): parallel blocks, half of each head rotated, a head with a bias."""
    config.require({"resid_pdrop": (0, 0.0), "embd_pdrop": (0, 0.0)})
    config.require({"qk_layernorm": (False,), "tie_word_embeddings": (False,)})
    decoder = read_decoder(
        config,
        full_attention(config),
        mlp_in_every_layer(config, "gelu_new", MLPNames("fc1", "fc2"), bias=True),
        activations=GELU_TANH,
        norm=layer_norm(config, "layer_norm_eps"),
        default_theta=10000.0,
        default_rotary_part=0.5,
        qkv_bias=True,
        output_bias=True,
        output_name="dense",
    )
    return replace(
        decoder,
        norms=LayerNorms(before_feed_forward=None),
        parallel_blocks=True,
        final_norm="final_layernorm",
        head_bias=True,
    )


def nemotron(config: HFConfig) -> DecoderSpec:
    """Nemotron 3 and 4 (arXiv 2402.16819): squared ReLU, layer norms stored as differences from 1, half a head rotated."""
    bias = config.flag("attention_bias")
    return read_decoder(
        config,
        full_attention(config),
        mlp_in_every_layer(config, "relu2", MLPNames(), bias=config.flag("mlp_bias")),
        activations=("relu2",),
        norm=replace(layer_norm(config, "norm_eps"), from_one=True),
        default_theta=10000.0,
        default_rotary_part=0.5,
        qkv_bias=bias,
        output_bias=bias,
    )


def mlp_in_every_layer(config: HFConfig, activation: str, names: MLPNames, *, bias: bool) -> Sequence[MLPSpec]:
    """Blocks without a gate; ``activation`` is transformers' name of it where there is no ``hidden_act``."""
    block = MLPSpec(config.positive_int("intermediate_size"), read_activation(config, activation), bias, names)
    return (block,) * config.positive_int("num_hidden_layers")


def layer_norm(config: HFConfig, eps: str) -> NormSpec:
    """With biases; ``eps`` is the name of the field."""
    return NormSpec(config.positive_float(eps, 1e-5), "layer", bias=True)


QWEN2 = decoder_family("qwen2", qwen2)
QWEN3 = decoder_family("qwen3", qwen3)
for family in (
    decoder_family("llama", llama),
    decoder_family("mistral", mistral),
    QWEN2,
    QWEN3,
    decoder_family("gemma", gemma),
    decoder_family("gemma3_text", gemma3_text),
    decoder_family("granite", granite),
    decoder_family("nemotron", nemotron),
    decoder_family("olmo2", olmo2),
    decoder_family("phi", phi),
    decoder_family("starcoder2", starcoder2),
):
    register_model(family)
