"""Configurations of Qwen2, Llama and Mistral as they are published, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig

from rl_backend.contracts import UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.rope import Llama3Scaling, YarnScaling

_LLAMA_31_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": _LLAMA_31_SCALING,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "Mistral-Nemo": {
        "architectures": ["MistralForCausalLM"],
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
}


def parse(name: str, **changes: Any) -> DecoderSpec:
    config = {**PUBLISHED[name], **changes}
    architecture = find_model("auto", config).parse_config(config)
    assert isinstance(architecture, DecoderSpec)
    return architecture


def attentions(decoder: DecoderSpec) -> list[GQASpec]:
    found = [layer.mixer for layer in decoder.layers if isinstance(layer.mixer, GQASpec)]
    assert len(found) == decoder.num_layers
    return found


def windows(decoder: DecoderSpec) -> tuple[int | None, ...]:
    return tuple(attention.window for attention in attentions(decoder))


def biases_and_norms(decoder: DecoderSpec) -> tuple[bool, ...]:
    """Of queries, keys and values; of the attention's output; of the feed-forward block; norms. Alike in every layer."""
    (found,) = {
        (attention.qkv_bias, attention.output_bias, layer.feed_forward.bias, attention.qk_norm)
        for attention, layer in zip(attentions(decoder), decoder.layers, strict=True)
        if isinstance(layer.feed_forward, SwiGLUSpec)
    }
    return found


def test_qwen2_has_biases_of_queries_keys_and_values_and_windows_only_when_they_are_switched_on() -> None:
    arch = parse("Qwen2.5-0.5B")
    (attention, *_) = attentions(arch)
    assert biases_and_norms(arch) == (True, False, False, False)
    assert (attention.head_dim, arch.num_layers, arch.max_length, attention.rotary.theta) == (64, 24, 32768, 1e6)
    assert windows(arch) == (None,) * 24
    sliding = {"use_sliding_window": True, "sliding_window": 4096}
    assert windows(parse("Qwen2.5-0.5B", **sliding, max_window_layers=20)) == (None,) * 20 + (4096,) * 4
    assert windows(parse("Qwen2.5-0.5B", **sliding)) == (None,) * 24
    unlimited = parse("Qwen2.5-0.5B", **sliding, max_window_layers=0, max_position_embeddings=4096)
    assert windows(unlimited) == (None,) * 24


def test_yarn_as_the_model_cards_of_qwen_add_it_lengthens_the_context() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    arch = parse("Qwen2.5-0.5B", rope_scaling=yarn)
    assert isinstance(attentions(arch)[0].rotary.scaling, YarnScaling)
    assert arch.max_length == 131072


_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("field", "value"),
    [("factor", 8.0), ("original_max_position_embeddings", 4096), ("beta_fast", 16), ("rope_type", "linear")],
)
def test_two_fields_of_the_rotary_embedding_that_differ_in_anything_are_refused(field: str, value: Any) -> None:
    both = {"rope_parameters": _YARN, "rope_scaling": dict(_YARN)}
    assert attentions(parse("Qwen2.5-0.5B", **both)) == attentions(parse("Qwen2.5-0.5B", rope_parameters=_YARN))
    for changed in both:
        with pytest.raises(UnsupportedError, match=r"rope_scaling=.*rope_parameters says something else; leave one out"):
            parse("Qwen2.5-0.5B", **both | {changed: {**_YARN, field: value}})


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}, 16384),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 2048}, 4096),
        ({**_LLAMA_31_SCALING, "original_max_position_embeddings": 1024}, 4096),
    ],
    ids=str,
)
def test_the_longest_sequence_is_what_the_rotary_embedding_is_made_for(
    name: str, scaling: dict[str, Any] | None, longest: int
) -> None:
    config = {**PUBLISHED[name], "max_position_embeddings": 4096, "rope_scaling": scaling}
    family = find_model("auto", config)
    architecture = family.parse_config(config)
    assert family.positions(architecture, config) == longest


def test_llama_2_has_the_first_theta_and_llama_31_its_scaling() -> None:
    (second, *_) = attentions(parse("Llama-2-7b"))
    assert (second.rotary.theta, second.num_kv_heads) == (1e4, 32)
    arch = parse("Llama-3.1-8B")
    (attention, *_) = attentions(arch)
    assert isinstance(attention.rotary.scaling, Llama3Scaling)
    assert (attention.rotary.theta, arch.max_length, attention.head_dim) == (5e5, 131072, 128)
    assert biases_and_norms(parse("Llama-3.1-8B", attention_bias=True, mlp_bias=True)) == (True, True, True, False)


def test_mistral_has_one_window_for_all_layers_or_none_and_any_head_dim() -> None:
    assert windows(parse("Mistral-7B-v0.1")) == (4096,) * 32
    assert windows(parse("Mistral-7B-v0.1", sliding_window=32768)) == (None,) * 32
    nemo = parse("Mistral-Nemo")
    assert (windows(nemo), attentions(nemo)[0].head_dim, nemo.max_length) == ((None,) * 40, 128, 131072)


def test_mistral_without_the_field_has_the_window_of_transformers() -> None:
    published = {name: value for name, value in PUBLISHED["Mistral-7B-v0.1"].items() if name != "sliding_window"}
    architecture = find_model("auto", published).parse_config(published)
    assert isinstance(architecture, DecoderSpec)
    assert windows(architecture) == (MistralConfig.from_dict(published).sliding_window,) * 32
    assert MistralConfig.from_dict({**published, "sliding_window": None}).sliding_window is None


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        ("Llama-3.1-8B", "sliding_window", 4096),
        ("Llama-3.1-8B", "layer_types", ["sliding_attention"] * 32),
        ("Llama-3.1-8B", "layer_types", ["full_attention"] * 31),
        ("Llama-3.1-8B", "attention_bias", "yes"),
        ("Llama-3.1-8B", "rope_interleaved", True),
        ("Llama-3.1-8B", "rope_theta", -1.0),
        ("Llama-3.1-8B", "pretraining_tp", 2),
        ("Llama-3.1-8B", "hidden_act", "gelu"),
        ("Llama-3.1-8B", "hidden_size", 4097),
        ("Llama-3.1-8B", "quantization_config", {"quant_method": "fp8"}),
        ("Llama-3.1-8B", "tie_word_embeddings", 1),
        ("Qwen2.5-0.5B", "attention_bias", False),
        ("Qwen2.5-0.5B", "layer_types", [*["full_attention"] * 23, "sliding_attention"]),
        ("Mistral-7B-v0.1", "layer_types", [*["sliding_attention"] * 31, "full_attention"]),
        ("Mistral-7B-v0.1", "sliding_window", 0),
        ("Mistral-7B-v0.1", "attention_bias", True),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(model: str, field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse(model, **{field: value})
    assert f"config.json: {field}=" in str(caught.value)
    assert f"native {PUBLISHED[model]['model_type']} family" in str(caught.value)


def test_windows_that_contradict_themselves_are_refused() -> None:
    for changes, field in (
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
    ):
        with pytest.raises(UnsupportedError, match=f"{field}="):
            parse("Qwen2.5-0.5B", **changes)
