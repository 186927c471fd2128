"""What ``config.json`` asks for and Megatron-Bridge does not pass on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_backend.contracts import UnsupportedError

_YARN_DEFAULTS: Mapping[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
"""What transformers computes with where ``config.json`` does not say; Megatron-Bridge passes on None."""


def require_same_model(hf_config: Any, provider: Any) -> None:
    """Sets what Megatron-Bridge leaves out and Megatron has; :class:`UnsupportedError` for what Megatron would ignore.

    Args:
        hf_config: transformers' configuration.
        provider: what Megatron-Bridge made of it.
    """
    rope: dict[str, Any] = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        provider.seq_len_interpolation_factor = float(rope["factor"])
    if kind == "yarn":
        for name, default in _YARN_DEFAULTS.items():
            if getattr(provider, name) is None:
                setattr(provider, name, default)
    known = {
        "default": True,
        "linear": True,
        "yarn": provider.position_embedding_type == "yarn" and rope.get("attention_factor") is None,
        "llama3": provider.rope_scaling
        and (rope.get("low_freq_factor"), rope.get("high_freq_factor"), rope.get("original_max_position_embeddings"))
        == (1.0, 4.0, 8192),
    }
    if not known.get(kind, False):
        raise UnsupportedError(
            f"config.json has rope parameters {rope!r}, which Megatron would compute otherwise or ignore; the native "
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
    if getattr(provider, "use_mup", False):
        raise UnsupportedError("the model scales its logits (MuP); the bridge runtime does not")


def _require_experts_everywhere(hf_config: Any, provider: Any) -> None:
    """Refuses layers without experts between those with, of which Megatron-Bridge makes mixtures as well."""
    step, listed = getattr(hf_config, "decoder_sparse_step", None) or 1, getattr(hf_config, "mlp_only_layers", None) or []
    dense = [layer for layer in range(provider.num_layers) if layer in listed or (layer + 1) % step]
    if provider.num_moe_experts is not None and dense and provider.moe_layer_freq == 1:
        raise UnsupportedError(
            f"config.json: decoder_sparse_step={step}, mlp_only_layers={list(listed)}: layers {dense} have no experts, and "
            "Megatron-Bridge gives experts to every layer; the native runtime may serve it",
            layers=dense,
        )
