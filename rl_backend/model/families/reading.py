"""Fields of ``config.json`` that several families share, read as parts of a decoder; others are refused by name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from rl_backend.model.blocks import FeedForwardSpec, LayerSpec
from rl_backend.model.decoder_spec import DecoderSpec, MTPNames, MTPSpec
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import ExpertNames, MoESpec
from rl_backend.model.hf_config import HFConfig, read_rotary
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.activation import HF_ACTIVATIONS, Activation
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.router import RouterSettings

_HONOURED: dict[str, tuple[Any, ...]] = {"attention_dropout": (0, 0.0), "pretraining_tp": (1,)}


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
    """A router with softmax over ``num_experts`` experts, of which a token goes to ``num_experts_per_tok``."""
    # transformers 5 writes ``num_experts``; published directories may have ``num_local_experts``.
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    numbers = {name: config.positive_int(name) for name in names or ["num_experts"]}
    if len(set(numbers.values())) > 1:
        config.refuse("num_local_experts", numbers["num_local_experts"], f"num_experts is {numbers['num_experts']}")
    num_experts = next(iter(numbers.values()))
    top_k = config.positive_int("num_experts_per_tok")
    if top_k > num_experts:
        config.refuse("num_experts_per_tok", top_k, f"there are {num_experts} experts")
    return RouterSettings(num_experts, top_k, normalise=normalise)


def full_attention(config: HFConfig, *other_names: str) -> tuple[None, ...]:
    """Windows of a family without sliding windows, with other names of its layers; fields that ask for them are refused."""
    config.require({"sliding_window": (), "use_sliding_window": (False,)})
    read_layer_types(config, {"full_attention", *other_names})
    return (None,) * config.positive_int("num_hidden_layers")


def windows_by_layer_type(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: of the layers that ``layer_types`` names or, without it, from ``max_window_layers`` on."""
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


_SIGMOID_HONOURED: Mapping[str, tuple[Any, ...]] = {
    # Fields of released directories; transformers knows neither, and takes these values.
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}


def read_sigmoid_mixture(
    config: HFConfig, *, default_groups: tuple[int, int] = (1, 1), default_scale: float = 1.0
) -> MoESpec:
    """``n_routed_experts`` experts, chosen within groups by scores and a bias, and ``n_shared_experts`` for all tokens.

    Args:
        default_groups: ``n_group`` and ``topk_group`` where there are none.
        default_scale: ``routed_scaling_factor`` where there is none.
    """
    config.require(_SIGMOID_HONOURED)
    width = config.positive_int("moe_intermediate_size")
    return MoESpec(
        read_sigmoid_router(config, default_groups, default_scale),
        width,
        ExpertNames(shared="shared_experts"),
        shared_intermediate_size=config.positive_int("n_shared_experts", 1) * width,
    )


def read_sigmoid_router(config: HFConfig, default_groups: tuple[int, int], default_scale: float) -> RouterSettings:
    experts, top_k = config.positive_int("n_routed_experts"), config.positive_int("num_experts_per_tok")
    groups, chosen = (
        config.positive_int(field, default) for field, default in zip(("n_group", "topk_group"), default_groups, strict=True)
    )
    if experts % groups:
        config.refuse("n_group", groups, f"does not divide n_routed_experts={experts}")
    size = experts // groups
    if groups > 1 and size < 2:
        config.refuse("n_group", groups, f"n_routed_experts={experts} leave 1 in a group, whose two best are added up")
    if chosen > groups:
        config.refuse("topk_group", chosen, f"there are n_group={groups}")
    if top_k > chosen * size:
        config.refuse("num_experts_per_tok", top_k, f"topk_group={chosen} groups have {chosen * size} experts")
    return RouterSettings(
        experts,
        top_k,
        score="sigmoid",
        normalise=config.flag("norm_topk_prob", True),
        scaling_factor=config.positive_float("routed_scaling_factor", default_scale),
        expert_bias=True,
        groups=groups,
        chosen_groups=chosen,
    )


def after_dense_layers(config: HFConfig, mixture: FeedForwardSpec, *, default_dense: int) -> Sequence[FeedForwardSpec]:
    """``mixture`` where ``mlp_layer_types`` says sparse, or from layer ``first_k_dense_replace`` on; else dense blocks."""
    layers, kinds = config.positive_int("num_hidden_layers"), config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace")
    if dense is not None and (not isinstance(dense, int) or isinstance(dense, bool) or dense < 0):
        config.refuse("first_k_dense_replace", dense, "expected a number of layers")
    first = default_dense if dense is None else dense
    by_number = ["dense" if layer < first else "sparse" for layer in range(layers)]
    if kinds is None:
        kinds = by_number
    elif not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        config.refuse("mlp_layer_types", kinds, f"expected 'dense' or 'sparse' for each of num_hidden_layers={layers}")
    elif dense is not None and kinds != by_number:
        config.refuse("first_k_dense_replace", dense, f"mlp_layer_types says {kinds}; make them the same")
    block = SwiGLUSpec(config.positive_int("intermediate_size"))
    return [block if kind == "dense" else mixture for kind in kinds]


def with_draft_layer(config: HFConfig, decoder: DecoderSpec, mixture: FeedForwardSpec) -> DecoderSpec:
    """``decoder`` with the layer for multi-token prediction, if ``num_nextn_predict_layers`` says that there is one."""
    config.require({"num_nextn_predict_layers": (0, 1)})
    if config.get("num_nextn_predict_layers", 0) != 1:
        return decoder
    names = MTPNames.after_layers(decoder.prefix, decoder.num_layers)
    # Its attention is that of the last layer. It has the mixture, even where all layers before it are dense.
    return replace(decoder, mtp=MTPSpec(decoder.layers[-1]._replace(feed_forward=mixture), names))


def weights_behind_layers(decoder: DecoderSpec) -> tuple[str, ...]:
    """Where layers for multi-token prediction are, whether or not ``config.json`` says that there are any."""
    return (f"{decoder.prefix}.layers.{decoder.num_layers}.",)
