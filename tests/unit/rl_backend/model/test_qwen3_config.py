"""Which Qwen3 configurations are read, and which are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.model import QWEN3, find_model
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.model.options import DecoderOptions

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""As transformers 4.51 wrote it for Qwen3-0.6B."""


def test_a_published_configuration_is_read() -> None:
    arch = QWEN3.parse_config(PUBLISHED)
    (attention,) = {layer.mixer for layer in arch.layers}
    assert isinstance(attention, GQASpec) and attention.qk_norm
    assert (arch.num_layers, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (28, 16, 8, 128)
    assert (attention.rotary.theta, arch.norm.eps, arch.tie_word_embeddings) == (1e6, 1e-6, True)


def test_rope_theta_is_read_where_transformers_5_writes_it() -> None:
    config = {key: value for key, value in PUBLISHED.items() if key not in ("rope_theta", "rope_scaling")}
    arch = QWEN3.parse_config({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert {layer.mixer.rotary.theta for layer in arch.layers} == {5e5}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", [*["full_attention"] * 27, "sliding_attention"]),
        ("layer_types", [*["full_attention"] * 27, "chunked_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 4.0}),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "beta_fast": 32}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "yarn", "factor": 0.5}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0, "truncate": "no"}),
        ("rope_scaling", "linear"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0}),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        ("partial_rotary_factor", 0.5),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 5),
        ("head_dim", 33),
        ("vocab_size", None),
        ("hidden_size", "1024"),
        ("rms_norm_eps", 0),
        ("num_hidden_layers", True),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        QWEN3.parse_config({**PUBLISHED, field: value})
    assert f"{field}=" in str(caught.value)
    assert caught.value.details["field"] == field


def test_a_configuration_without_rope_theta_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="rope_theta=None"):
        QWEN3.parse_config({key: value for key, value in PUBLISHED.items() if key != "rope_theta"})


def test_qwen3_is_found_by_its_model_type_and_by_name() -> None:
    assert find_model("auto", PUBLISHED) is QWEN3
    assert find_model("qwen3", {}) is QWEN3


def test_another_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"model_type='qwen9'.*qwen3"):
        find_model("auto", {**PUBLISHED, "model_type": "qwen9"})


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown field"):
        DecoderOptions(fused=True)
