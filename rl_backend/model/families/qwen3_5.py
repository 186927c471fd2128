"""Qwen3.5 and Qwen3-Next: three layers of gated DeltaNet to one of gated attention, dense or with mixtures of experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_backend.model.blocks import FeedForwardSpec
from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families.reading import (
    in_sparse_layers,
    read_decoder,
    read_layer_types,
    read_router,
    swiglu_in_every_layer,
)
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.registry import ModelFamily, register_model
from rl_backend.primitive.norm import NormSpec

_HONOURED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    # What a state is kept in, and how outputs of the recurrence are gated; transformers knows neither field.
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("silu", "swish"),
    "sliding_window": (),
    "use_sliding_window": (False,),
}


# The vision tower and the layer for multi-token prediction, which grows stale as the language model learns.
_KEPT = ("model.visual.", "mtp.")


def qwen3_5(config: HFConfig) -> DecoderSpec:
    """Qwen3.5, dense."""
    return _hybrid(config, swiglu_in_every_layer(config), default_kv_heads=4)


def qwen3_5_moe(config: HFConfig) -> DecoderSpec:
    """Qwen3.5 with experts in every layer and one that all tokens go through, behind a gate."""
    config.require({"mlp_only_layers": ([],), "norm_topk_prob": (True,), "decoder_sparse_step": (1,)})
    feed_forward = [_mixture(config, normalise=True)] * config.positive_int("num_hidden_layers")
    return _hybrid(config, feed_forward, default_kv_heads=2)


def qwen3_next(config: HFConfig) -> DecoderSpec:
    """Qwen3-Next: the mixture of Qwen3.5, other input projections of gated DeltaNet, dense layers as in Qwen3-MoE."""
    mixture = _mixture(config, normalise=config.flag("norm_topk_prob", True))
    sparse = config.get("decoder_sparse_step", 1) == 1 and not config.get("mlp_only_layers", [])
    layers = config.positive_int("num_hidden_layers")
    feed_forward = [mixture] * layers if sparse else in_sparse_layers(config, mixture)
    return _hybrid(config, feed_forward, default_kv_heads=2, by_key_head=True)


def _hybrid(
    config: HFConfig, feed_forward: Sequence[FeedForwardSpec], *, default_kv_heads: int, by_key_head: bool = False
) -> DecoderSpec:
    config.require(_HONOURED)
    layers = config.positive_int("num_hidden_layers")
    interval = config.positive_int("full_attention_interval", 4)
    kinds = read_layer_types(config, {"full_attention", "linear_attention"})
    kinds = kinds or tuple("linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers))
    decoder = read_decoder(
        _with_rotary_of_text(config),
        [None] * layers,
        feed_forward,
        norm=NormSpec(config.positive_float("rms_norm_eps", 1e-6), from_one=True),
        default_head_dim=256,
        default_kv_heads=default_kv_heads,
        default_theta=10000.0,
        default_rotary_part=0.25,
        qk_norm=True,
        output_gate=True,
    )
    mixer = _read_deltanet(config, by_key_head=by_key_head)
    stack = zip(decoder.layers, kinds, strict=True)
    return replace(
        decoder,
        layers=tuple(layer if kind == "full_attention" else layer._replace(mixer=mixer) for layer, kind in stack),
    )


def _read_deltanet(config: HFConfig, *, by_key_head: bool) -> DeltaNetSpec:
    key_heads, heads = config.positive_int("linear_num_key_heads", 16), config.positive_int("linear_num_value_heads", 32)
    if heads % key_heads:
        config.refuse("linear_num_value_heads", heads, f"linear_num_key_heads={key_heads} must divide it")
    return DeltaNetSpec(
        num_key_heads=key_heads,
        num_value_heads=heads,
        key_dim=config.positive_int("linear_key_head_dim", 128),
        value_dim=config.positive_int("linear_value_head_dim", 128),
        conv_width=config.positive_int("linear_conv_kernel_dim", 4),
        by_key_head=by_key_head,
    )


def _mixture(config: HFConfig, *, normalise: bool) -> MoESpec:
    return MoESpec(
        # As transformers and vLLM round them: routes are to be the same.
        replace(read_router(config, normalise=normalise), rounded_logits=True),
        config.positive_int("moe_intermediate_size"),
        shared_intermediate_size=config.positive_int("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _with_rotary_of_text(config: HFConfig) -> HFConfig:
    # Without how frequencies are shared out to the time, height and width of images: tokens of text have one position.
    changed = {
        field: {name: value for name, value in parameters.items() if name not in ("mrope_section", "mrope_interleaved")}
        for field in ("rope_parameters", "rope_scaling")
        if isinstance(parameters := config.get(field), Mapping)
    }
    return HFConfig({**config.fields, **changed}, config.family)


def _released_family(name: str, read: Callable[[HFConfig], DecoderSpec]) -> ModelFamily:
    """Of text models, and of the released ones that have such a model in them."""

    def parse(hf_config: Mapping[str, Any]) -> DecoderSpec:
        whole = HFConfig(hf_config, name)
        text = whole.get("text_config")
        if text is None:
            return read(whole)
        if not isinstance(text, Mapping):
            whole.refuse("text_config", text, "expected an object")
        tied = [
            fields["tie_word_embeddings"] for fields in (text, hf_config) if fields.get("tie_word_embeddings") is not None
        ]
        if len(set(tied)) > 1:
            whole.refuse("tie_word_embeddings", tied[1], f"text_config says {tied[0]}; make them the same")
        decoder = read(HFConfig({**text, "tie_word_embeddings": tied[0] if tied else False}, name))
        return replace(decoder, prefix="model.language_model")

    family = decoder_family(name, read, lambda _: _KEPT)
    return replace(family, hf_model_types=(name, f"{name}_text"), parse_config=parse)


for family in (
    _released_family("qwen3_5", qwen3_5),
    _released_family("qwen3_5_moe", qwen3_5_moe),
    decoder_family("qwen3_next", qwen3_next, lambda _: _KEPT[1:]),
):
    register_model(family)
