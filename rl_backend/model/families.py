"""The built-in model families: what each ``config.json`` says, as a stack of blocks.

Each reader refuses by name the fields that this implementation would not honour; see
:func:`~rl_backend.model.hf_decoder.read_decoder` for those that all share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_backend.contracts import ModelOptions
from rl_backend.model.decoder import STAGE_COPIES, Decoder, DecoderSpec, parallelize
from rl_backend.model.feedforward.moe import ExpertNames, MoEOptions, MoESpec
from rl_backend.model.feedforward.swiglu import SwiGLUSpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.hf_decoder import (
    full_attention,
    read_decoder,
    read_router,
    swiglu_in_every_layer,
    window_of_every_layer,
    windows_by_layer_type,
)
from rl_backend.model.registry import ModelFamily, register_model


class DenseOptions(ModelOptions):
    """Dense decoders have no options of their own; the type exists so that an unknown one is refused."""


def decoder_family(
    name: str, read: Callable[[HFConfig], DecoderSpec], options_type: type[ModelOptions] = DenseOptions
) -> ModelFamily:
    """The family of the ``model_type`` called ``name``, all of whose differences are in the decoder that ``read`` gives.

    Args:
        options_type: :class:`~rl_backend.model.feedforward.moe.MoEOptions` for a stack with mixtures of experts.
    """

    def parse_config(hf_config: Mapping[str, Any]) -> DecoderSpec:
        return read(HFConfig(hf_config, name))

    return ModelFamily(
        name=name,
        hf_model_types=(name,),
        options_type=options_type,
        parse_config=parse_config,
        build=Decoder,
        parallelize=parallelize,
        weight_names=DecoderSpec.weight_names,
        heads=("log_probs", "values"),
        max_length=lambda decoder: decoder.max_length,
        num_layers=lambda decoder: decoder.num_layers,
        stage_copies=STAGE_COPIES,
        check_layout=DecoderSpec.check_layout,
        routed_layers=lambda decoder: decoder.routed_layers,
    )


def qwen2(config: HFConfig) -> DecoderSpec:
    """Qwen2 and Qwen2.5 (arXiv 2407.10671): biases in the projections of queries, keys and values."""
    config.require({"attention_bias": (True,), "mlp_bias": (False,)})
    return read_decoder(config, windows_by_layer_type(config), swiglu_in_every_layer(config), qkv_bias=True)


def qwen3(config: HFConfig) -> DecoderSpec:
    """Dense Qwen3 (arXiv 2505.09388): normalised queries and keys; transformers 4.51 or later."""
    config.require({"attention_bias": (False,), "mlp_bias": (False,)})
    windows, feed_forward = windows_by_layer_type(config), swiglu_in_every_layer(config)
    return read_decoder(config, windows, feed_forward, default_head_dim=128, qk_norm=True)


def llama(config: HFConfig) -> DecoderSpec:
    """Llama 1 to 3 (Touvron et al., arXiv 2302.13971, 2307.09288; Grattafiori et al., arXiv 2407.21783).

    ``attention_bias`` puts biases into all four projections of the attention, ``mlp_bias`` into the three of the
    feed-forward block. ``rope_theta`` is 10000 where it is absent, as in Llama 1 and 2.
    """
    config.require({"rope_interleaved": (False,)})
    bias, feed_forward = config.flag("attention_bias"), swiglu_in_every_layer(config, bias=config.flag("mlp_bias"))
    return read_decoder(config, full_attention(config), feed_forward, default_theta=10000.0, qkv_bias=bias, output_bias=bias)


def mistral(config: HFConfig) -> DecoderSpec:
    """Mistral 7B and Nemo (Jiang et al., arXiv 2310.06825): one sliding window for all layers, or none."""
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": ()})
    return read_decoder(config, window_of_every_layer(config), swiglu_in_every_layer(config), default_theta=10000.0)


def mixtral(config: HFConfig) -> DecoderSpec:
    """Mixtral 8x7B and 8x22B (Jiang et al., arXiv 2401.04088): experts in every layer, a softmax over the chosen ones."""
    config.require(
        {"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (), "router_jitter_noise": (0, 0.0)}
    )
    windows = full_attention(config) if config.get("sliding_window") is None else window_of_every_layer(config)
    # The same weights as a softmax over the chosen logits, computed as transformers and vLLM do.
    router, names = read_router(config, normalise=True), ExpertNames("block_sparse_moe", "w1", "w3", "w2")
    mixture = MoESpec(router, config.positive_int("intermediate_size"), names)
    return read_decoder(config, windows, [mixture] * len(windows), default_theta=1e6)


def qwen3_moe(config: HFConfig) -> DecoderSpec:
    """Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts chosen by a softmax over all of them.

    Every ``decoder_sparse_step``-th layer has experts, except those that ``mlp_only_layers`` names.
    """
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)})
    router = read_router(config, normalise=config.flag("norm_topk_prob"))
    mixture = MoESpec(router, config.positive_int("moe_intermediate_size"))
    dense = SwiGLUSpec(config.positive_int("intermediate_size"))
    step, without = config.positive_int("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = range(config.positive_int("num_hidden_layers"))
    if not isinstance(without, list) or any(isinstance(layer, bool) or layer not in layers for layer in without):
        config.refuse("mlp_only_layers", without, f"expected a list of layers from 0 to {layers[-1]}")
    feed_forward = [mixture if (layer + 1) % step == 0 and layer not in without else dense for layer in layers]
    return read_decoder(config, windows_by_layer_type(config), feed_forward, qk_norm=True)


QWEN2 = decoder_family("qwen2", qwen2)
QWEN3 = decoder_family("qwen3", qwen3)
LLAMA = decoder_family("llama", llama)
MISTRAL = decoder_family("mistral", mistral)
MIXTRAL = decoder_family("mixtral", mixtral, MoEOptions)
QWEN3_MOE = decoder_family("qwen3_moe", qwen3_moe, MoEOptions)
for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE):
    register_model(family)
