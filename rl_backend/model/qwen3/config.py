"""What a Qwen3 ``config.json`` says, and refusal of what this implementation would not honour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rl_backend.contracts import ModelOptions, UnsupportedError


class Qwen3Options(ModelOptions):
    """The family has no options of its own; the type exists so that an unknown one is refused."""


@dataclass(frozen=True)
class Qwen3Architecture:
    """Dense Qwen3 (Qwen3 technical report, 2025).

    Attributes:
        max_position_embeddings: longest sequence, in tokens.
        rope_theta: base of the rotary frequencies.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


def parse_config(hf_config: Mapping[str, Any]) -> Qwen3Architecture:
    """Reads a Hugging Face configuration of transformers 4.51 or later.

    Raises:
        UnsupportedError: a field is missing, inconsistent, or asks for something that this implementation does not do.
    """
    for field, honoured in _FIXED.items():
        value = hf_config.get(field)
        if value is not None and value not in honoured:
            _refuse(field, value, f"only {' or '.join(map(repr, honoured))} is implemented")
    _refuse_sliding_window(hf_config)
    heads = _positive_int(hf_config, "num_attention_heads")
    hidden_size = _positive_int(hf_config, "hidden_size")
    architecture = Qwen3Architecture(
        vocab_size=_positive_int(hf_config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(hf_config, "intermediate_size"),
        num_layers=_positive_int(hf_config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_positive_int(hf_config, "num_key_value_heads", default=heads),
        head_dim=_positive_int(hf_config, "head_dim", default=128),
        max_position_embeddings=_positive_int(hf_config, "max_position_embeddings"),
        rms_norm_eps=_positive_float(hf_config, "rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(hf_config),
        tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
    )
    if heads % architecture.num_kv_heads:
        _refuse("num_key_value_heads", architecture.num_kv_heads, f"does not divide num_attention_heads={heads}")
    if architecture.head_dim % 2:
        _refuse("head_dim", architecture.head_dim, "rotary embedding needs an even number")
    return architecture


_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
}


def _refuse_sliding_window(hf_config: Mapping[str, Any]) -> None:
    if hf_config.get("use_sliding_window"):
        _refuse("use_sliding_window", True, "sliding-window attention is not implemented")
    other = sorted({kind for kind in hf_config.get("layer_types") or () if kind != "full_attention"})
    if other:
        _refuse("layer_types", other, "only 'full_attention' is implemented")


def _rope_theta(hf_config: Mapping[str, Any]) -> float:
    parameters: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        value = hf_config.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            _refuse(field, value, "expected an object")
        kind = value.get("rope_type", value.get("type", "default"))
        unknown = sorted(set(value) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if kind != "default" or unknown or value.get("partial_rotary_factor", 1.0) != 1.0:
            _refuse(field, dict(value), "only the default rotary embedding, without scaling, is implemented")
        parameters.update(value)
    if "rope_theta" in parameters:
        return _positive_float(parameters, "rope_theta")
    return _positive_float(hf_config, "rope_theta")


def _positive_int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(field, value, "expected a positive whole number")
    return value


def _positive_float(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = config.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        _refuse(field, value, "expected a positive number")
    return float(value)


def _refuse(field: str, value: Any, reason: str) -> NoReturn:
    raise UnsupportedError(
        f"config.json: {field}={value!r}: {reason} by the native qwen3 family; use a model without it, or "
        "register_model(...) a family that has it",
        field=field,
        value=repr(value),
    )
