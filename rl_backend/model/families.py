"""The built-in model families: what each ``config.json`` says, as a stack of blocks.

Each reader refuses by name the fields that this implementation would not honour; see :func:`read_decoder` for those that
all share.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from rl_backend.model.blocks import FeedForwardSpec, LayerSpec
from rl_backend.model.decoder import STAGE_COPIES, Decoder, parallelize
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.feedforward.swiglu import SwiGLUSpec
from rl_backend.model.hf_config import HFConfig, read_rotary
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.options import DecoderOptions
from rl_backend.model.registry import ModelFamily, register_model
from rl_backend.primitive.activation import HF_ACTIVATIONS, Activation
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.router import RouterSettings

_HONOURED: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
}


class AttentionDifferences(TypedDict, total=False):
    """Fields of :class:`~rl_backend.model.mixers.gqa.GQASpec` that are a family's, not a model's."""

    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    joint_qk_norm: bool
    scale: float
    output_name: str
    output_gate: bool
    sinks: bool


def decoder_family(name: str, read: Callable[[HFConfig], DecoderSpec]) -> ModelFamily:
    """The family of the ``model_type`` called ``name``, all of whose differences are in the decoder that ``read`` gives."""
    return ModelFamily(
        name=name,
        hf_model_types=(name,),
        options_type=DecoderOptions,
        parse_config=lambda hf_config: read(HFConfig(hf_config, name)),
        build=Decoder,
        parallelize=parallelize,
        weight_names=DecoderSpec.weight_names,
        heads=("log_probs", "values"),
        max_length=lambda decoder: decoder.max_length,
        num_layers=lambda decoder: decoder.num_layers,
        stage_copies=STAGE_COPIES,
        check_layout=DecoderSpec.check_layout,
        routed_layers=lambda decoder: decoder.routed_layers,
        indexed_layers=lambda decoder: decoder.indexed_layers,
        float32_head=True,
        kept_weights=DecoderSpec.kept_prefixes,
        configured=DecoderSpec.configured,
    )


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
    windows, feed_forward = window_of_every_layer(config), swiglu_in_every_layer(config)
    return read_decoder(config, windows, feed_forward, default_theta=10000.0, default_kv_heads=8)


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
    """Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts chosen by a softmax over all of them.

    Every ``decoder_sparse_step``-th layer has experts, except those that ``mlp_only_layers`` names.
    """
    config.require({"attention_bias": (False,), "mlp_bias": (False,), "use_sliding_window": (False,)})
    router = read_router(config, normalise=config.flag("norm_topk_prob"))
    feed_forward = in_sparse_layers(config, MoESpec(router, config.positive_int("moe_intermediate_size")))
    return read_decoder(config, windows_by_layer_type(config), feed_forward, default_kv_heads=4, qk_norm=True)


def in_sparse_layers(config: HFConfig, mixture: MoESpec) -> Sequence[FeedForwardSpec]:
    """``mixture`` in every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not name, else dense blocks."""
    dense = SwiGLUSpec(config.positive_int("intermediate_size"))
    step, without = config.positive_int("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
    layers = range(config.positive_int("num_hidden_layers"))
    if not isinstance(without, list) or any(isinstance(layer, bool) or layer not in layers for layer in without):
        config.refuse("mlp_only_layers", without, f"expected a list of layers from 0 to {layers[-1]}")
    return [mixture if (layer + 1) % step == 0 and layer not in without else dense for layer in layers]


def read_decoder(
    config: HFConfig,
    windows: Sequence[int | None],
    feed_forward: Sequence[FeedForwardSpec],
    *,
    activations: Sequence[str] = ("silu",),
    norm: NormSpec | None = None,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    default_theta: float | None = None,
    default_rotary_part: float | None = None,
    default_tied: bool = False,
    **differences: Unpack[AttentionDifferences],
) -> DecoderSpec:
    """Reads the fields that decoders share; every layer has grouped-query attention.

    A family takes the result with other values of what else a decoder has (scales, norms, biases, mixers), as
    ``dataclasses.replace`` gives it.

    Args:
        windows: of each layer, as in :class:`~rl_backend.model.mixers.gqa.GQASpec`; those that hide nothing are dropped.
        feed_forward: of each layer.
        activations: values of ``hidden_act`` that ``feed_forward`` honours.
        norm: None for RMS norms with ``rms_norm_eps``.
        default_head_dim: None takes ``hidden_size / num_attention_heads``.
        default_kv_heads: where ``num_key_value_heads`` is absent; None takes ``num_attention_heads``, as null does.
        default_theta, default_rotary_part: as in :func:`~rl_backend.model.hf_config.read_rotary`.
        default_tied: whether embeddings are the head where ``tie_word_embeddings`` does not say.

    Raises:
        UnsupportedError: a field is missing, inconsistent, or asks for something that this implementation does not do.
    """
    config.require({**_HONOURED, "hidden_act": tuple(activations)})
    config.require_readable_weights()
    heads, hidden_size = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    as_many = config.fields.get("num_key_value_heads", default_kv_heads) is None
    kv_heads = heads if as_many else config.positive_int("num_key_value_heads", default_kv_heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    if default_head_dim is None and config.get("head_dim") is None:
        if hidden_size % heads:
            config.refuse("hidden_size", hidden_size, f"without head_dim, num_attention_heads={heads} must divide it")
        default_head_dim = hidden_size // heads
    head_dim = config.positive_int("head_dim", default_head_dim)
    rotary, max_length = read_rotary(config, head_dim, default_theta, default_rotary_part)
    attention = GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary=rotary, **differences)
    limited = [None if window is None or window >= max_length else window for window in windows]
    return DecoderSpec(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        max_length=max_length,
        norm=norm or NormSpec(config.positive_float("rms_norm_eps", 1e-6)),
        tie_word_embeddings=config.flag("tie_word_embeddings", default_tied),
        layers=tuple(
            LayerSpec(replace(attention, window=window), block) for window, block in zip(limited, feed_forward, strict=True)
        ),
    )


def swiglu_in_every_layer(
    config: HFConfig, *, bias: bool = False, activation: Activation = "silu"
) -> tuple[SwiGLUSpec, ...]:
    """Dense feed-forward blocks of ``intermediate_size``."""
    block = SwiGLUSpec(config.positive_int("intermediate_size"), bias, activation)
    return (block,) * config.positive_int("num_hidden_layers")


def read_activation(config: HFConfig, default: str) -> Activation:
    """That of ``hidden_act``, or of ``default``, transformers' name for it."""
    name = config.get("hidden_act", default)
    if not isinstance(name, str) or name not in HF_ACTIVATIONS:
        config.refuse("hidden_act", name, f"expected one of {', '.join(HF_ACTIVATIONS)}")
    return HF_ACTIVATIONS[name]


def read_router(config: HFConfig, *, normalise: bool) -> RouterSettings:
    """A router with softmax over ``num_experts`` experts, of which a token goes to ``num_experts_per_tok``.

    transformers 5 writes ``num_experts``; published directories may have ``num_local_experts``.

    Raises:
        UnsupportedError: a number is missing, both are there and differ, or there are fewer experts than a token takes.
    """
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    numbers = {name: config.positive_int(name) for name in names or ["num_experts"]}
    if len(set(numbers.values())) > 1:
        config.refuse("num_local_experts", numbers["num_local_experts"], f"num_experts is {numbers['num_experts']}")
    num_experts = next(iter(numbers.values()))
    top_k = config.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        config.refuse("num_experts_per_tok", top_k, f"there are {num_experts} experts")
    return RouterSettings(num_experts, top_k, normalise=normalise)


def full_attention(config: HFConfig) -> tuple[None, ...]:
    """Windows of a family without sliding windows; ``sliding_window`` and ``layer_types`` that ask for them are refused."""
    config.require({"sliding_window": (), "use_sliding_window": (False,)})
    read_layer_types(config, {"full_attention"})
    return (None,) * config.positive_int("num_hidden_layers")


def windows_by_layer_type(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: with ``use_sliding_window``, of the layers that ``layer_types`` names or, without it, of
    those from ``max_window_layers`` on."""
    layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, {"full_attention", "sliding_attention"})
    if not config.flag("use_sliding_window"):
        if types is not None and "sliding_attention" in types:
            config.refuse("layer_types", list(types), "sliding attention with use_sliding_window=false is contradictory")
        return (None,) * layers
    window = config.positive_int("sliding_window")
    if types is None:
        first = config.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            config.refuse("max_window_layers", first, "expected a whole number of layers")
        types = tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_of_every_layer(config: HFConfig, default: int | None = 4096) -> tuple[int | None, ...]:
    """Windows of Mistral: ``sliding_window`` in every layer, null for none; ``default`` where it is absent."""
    layers = config.positive_int("num_hidden_layers")
    without = config.fields.get("sliding_window", default) is None
    window = None if without else config.positive_int("sliding_window", default)
    read_layer_types(config, {"full_attention" if window is None else "sliding_attention"})
    return (window,) * layers


def read_layer_types(config: HFConfig, honoured: set[str]) -> tuple[str, ...] | None:
    """``layer_types``, each one of ``honoured``; None where the field is absent."""
    types = config.get("layer_types")
    if types is None:
        return None
    layers = config.positive_int("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers:
        config.refuse("layer_types", types, f"expected one for each of num_hidden_layers={layers}")
    other = sorted({str(kind) for kind in types} - honoured)
    if other:
        config.refuse("layer_types", other, f"only {' and '.join(map(repr, sorted(honoured)))} is implemented here")
    return tuple(types)


QWEN2 = decoder_family("qwen2", qwen2)
QWEN3 = decoder_family("qwen3", qwen3)
LLAMA = decoder_family("llama", llama)
MISTRAL = decoder_family("mistral", mistral)
MIXTRAL = decoder_family("mixtral", mixtral)
QWEN3_MOE = decoder_family("qwen3_moe", qwen3_moe)
for family in (LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE):
    register_model(family)
