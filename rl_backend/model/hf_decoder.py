"""Fields of ``config.json`` that families of decoders share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rl_backend.model.blocks import FeedForwardSpec, LayerSpec
from rl_backend.model.decoder import DecoderSpec
from rl_backend.model.feedforward.swiglu import SwiGLUSpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.hf_rotary import read_rotary
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.router import RouterSettings

_HONOURED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "partial_rotary_factor": (1, 1.0),
}


def read_decoder(
    config: HFConfig,
    windows: Sequence[int | None],
    feed_forward: Sequence[FeedForwardSpec],
    *,
    default_head_dim: int | None = None,
    default_theta: float | None = None,
    **differences: bool,
) -> DecoderSpec:
    """Reads the fields that decoders share; every layer has grouped-query attention.

    A family with other mixers takes the result with other ``layers``.

    Args:
        windows: of each layer, as in :class:`~rl_backend.model.mixers.gqa.GQASpec`; those that hide nothing are dropped.
        feed_forward: of each layer.
        default_head_dim: None takes ``hidden_size / num_attention_heads``.
        default_theta: as in :func:`~rl_backend.model.hf_rotary.read_rotary`.
        differences: biases and norms of :class:`~rl_backend.model.mixers.gqa.GQASpec`.

    Raises:
        UnsupportedError: a field is missing, inconsistent, or asks for something that this implementation does not do.
    """
    config.require(_HONOURED)
    heads, hidden_size = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    kv_heads = config.positive_int("num_key_value_heads", heads)
    if heads % kv_heads:
        config.refuse("num_key_value_heads", kv_heads, f"does not divide num_attention_heads={heads}")
    if default_head_dim is None and config.get("head_dim") is None:
        if hidden_size % heads:
            config.refuse("hidden_size", hidden_size, f"without head_dim, num_attention_heads={heads} must divide it")
        default_head_dim = hidden_size // heads
    head_dim = config.positive_int("head_dim", default_head_dim)
    rotary, max_length = read_rotary(config, head_dim, default_theta)
    attention = GQASpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary=rotary, **differences)
    limited = [None if window is None or window >= max_length else window for window in windows]
    return DecoderSpec(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        max_length=max_length,
        rms_norm_eps=config.positive_float("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        layers=tuple(
            LayerSpec(replace(attention, window=window), block) for window, block in zip(limited, feed_forward, strict=True)
        ),
    )


def swiglu_in_every_layer(config: HFConfig, *, bias: bool = False) -> tuple[SwiGLUSpec, ...]:
    """Dense feed-forward blocks of ``intermediate_size``."""
    return (SwiGLUSpec(config.positive_int("intermediate_size"), bias),) * config.positive_int("num_hidden_layers")


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
    """Windows of a family without sliding windows.

    Raises:
        UnsupportedError: ``sliding_window`` or ``layer_types`` asks for them.
    """
    config.require({"sliding_window": (), "use_sliding_window": (False,)})
    _layer_types(config, {"full_attention"})
    return (None,) * config.positive_int("num_hidden_layers")


def windows_by_layer_type(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Qwen2 and Qwen3: with ``use_sliding_window``, of the layers that ``layer_types`` names or, without it, of
    those from ``max_window_layers`` on."""
    layers = config.positive_int("num_hidden_layers")
    types = _layer_types(config, {"full_attention", "sliding_attention"})
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


def window_of_every_layer(config: HFConfig) -> tuple[int | None, ...]:
    """Windows of Mistral: ``sliding_window`` in every layer, null for none; 4096 where it is absent, as in transformers."""
    layers = config.positive_int("num_hidden_layers")
    without = config.fields.get("sliding_window", 4096) is None
    window = None if without else config.positive_int("sliding_window", 4096)
    _layer_types(config, {"full_attention" if window is None else "sliding_attention"})
    return (window,) * layers


def _layer_types(config: HFConfig, honoured: set[str]) -> tuple[str, ...] | None:
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
