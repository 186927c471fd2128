"""Families that are Llama but for fields of their specification, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN

from rl_backend.contracts import ModelOptions, UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.blocks import LayerNorms, RouterInput
from rl_backend.model.decoder import DecoderLayer
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.activation import ACTIVATIONS, HF_ACTIVATIONS
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import rotary_cos_sin
from tests.support.critic import transformers_values, write_critic
from tests.support.families import load_native, random_sequences, run_native
from tests.support.native import open_runtime
from tests.support.variants import VARIANTS, write_variant
from tests.unit.rl_backend.model.test_families import assert_equals_transformers, assert_is_saved_for_transformers

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2, one head of keys, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "starcoder2, no biases, untied": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gemma3, as transformers 4 wrote it": (
        "gemma3_text",
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": None},
    ),
    "phi, a quarter of each head": ("phi", {"partial_rotary_factor": 0.25}),
    "phi, YaRN": ("phi", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}}),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2b": {
        "model_type": "gemma",
        "vocab_size": 256000,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "granite-3.1-2b": {
        "model_type": "granite",
        "vocab_size": 49155,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 5000000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "phi-2": {
        "model_type": "phi",
        "vocab_size": 51200,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-05,
        "partial_rotary_factor": 0.4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


def parse(name: str, **changes: Any) -> DecoderSpec:
    config = {**PUBLISHED[name], **changes}
    decoder = find_model("auto", config).parse_config(config)
    assert isinstance(decoder, DecoderSpec)
    return decoder


def attention(decoder: DecoderSpec) -> GQASpec:
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, GQASpec)
    return mixer


@pytest.mark.shows("model: Gemma 1 and 3, Granite, Nemotron, OLMo 2, Phi and StarCoder 2 equal transformers to 1e-5")
@pytest.mark.parametrize("family", VARIANTS)
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path, family: str) -> None:
    assert_equals_transformers(write_variant(family, tmp_path / "model"))


@pytest.mark.parametrize("case", OTHERS)
def test_other_values_of_their_fields_equal_transformers(tmp_path: Path, case: str) -> None:
    family, changes = OTHERS[case]
    assert_equals_transformers(write_variant(family, tmp_path / "model", **changes))


@pytest.mark.shows(
    "model: Gemma 1 and 3, Granite, Nemotron, OLMo 2, Phi, StarCoder 2 are trained, saved and read by transformers"
)
@pytest.mark.parametrize("family", VARIANTS)
def test_a_trained_model_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path, family: str) -> None:
    path = write_variant(family, tmp_path / "model")
    assert_is_saved_for_transformers(path, tmp_path / "saved", steps=4)


@pytest.mark.shows("critic: Qwen2, Llama, Mistral, Qwen3, Gemma, Phi and StarCoder 2 can have a value head")
@pytest.mark.parametrize("family", ["gemma", "phi", "starcoder2"])
def test_critics_of_a_variant_equal_transformers_and_need_no_bias_of_the_head(tmp_path: Path, family: str) -> None:
    model = write_variant(family, tmp_path / "model")
    with open_runtime(model) as runtime:
        critic = runtime.build_model(head="values")
        assert not {name for name, _ in runtime.export_weights(critic) if name.startswith("lm_head")}
    path = write_critic(tmp_path / "critic", model)
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        values = run_native(load_native(path, head="values"), sequences).values
    torch.testing.assert_close(values, transformers_values(path, sequences), atol=1e-5, rtol=0)


def test_published_configurations_are_read_with_their_defaults() -> None:
    gemma, gemma3, granite, phi = (parse(name) for name in PUBLISHED)
    windows = [layer.mixer.window for layer in gemma3.layers if isinstance(layer.mixer, GQASpec)]
    assert windows == ([512] * 5 + [None]) * 4 + [512] * 2
    angles = [layer.mixer.rotary for layer in gemma3.layers if layer.mixer.rotary is not None]
    assert [rotary.theta for rotary in angles[4:6]] == [1e4, 1e6]
    assert attention(gemma3).scale == 1 / 16
    assert gemma.tie_word_embeddings and gemma.norm == NormSpec(1e-6, from_one=True)
    assert gemma.embedding_scale == 2048**0.5
    assert (granite.residual_scale, granite.embedding_scale, granite.logit_scale) == (0.22, 12.0, 0.125)
    assert attention(granite).scale == 0.015625
    assert (attention(phi).head_dim, attention(phi).rotary.head_dim) == (80, 32)
    assert phi.head_bias and phi.parallel_blocks and phi.norms.before_feed_forward is None
    assert phi.weight_names("log_probs")["layers.31.self_attn.o_proj.bias"] == "model.layers.31.self_attn.dense.bias"


@pytest.mark.parametrize(
    ("model", "field", "value", "reason"),
    [
        ("gemma-2b", "hidden_act", "gelu", "only 'gelu_pytorch_tanh' or 'gelu_new' is implemented"),
        ("gemma-2b", "hidden_activation", "gelu", "only 'gelu_pytorch_tanh' or 'gelu_new' is implemented"),
        ("gemma-2b", "use_bidirectional_attention", True, "only False is implemented"),
        ("gemma-3-1b", "final_logit_softcapping", 30.0, "it is not implemented"),
        ("gemma-3-1b", "layer_types", ["sliding_attention"] * 25, "expected one for each of num_hidden_layers=26"),
        ("granite-3.1-2b", "logits_scaling", 0, "expected a positive, finite number"),
        ("granite-3.1-2b", "partial_rotary_factor", 0.5, "only a partial_rotary_factor of 1.0 is implemented"),
        ("phi-2", "qk_layernorm", True, "only False is implemented"),
        ("phi-2", "resid_pdrop", 0.1, "only 0 or 0.0 is implemented"),
        ("phi-2", "tie_word_embeddings", True, "only False is implemented"),
        ("phi-2", "partial_rotary_factor", 1.5, "expected a partial_rotary_factor above 0 and at most 1"),
        ("phi-2", "hidden_act", "relu", "only 'gelu_pytorch_tanh' or 'gelu_new' is implemented"),
    ],
)
def test_what_a_variant_does_not_honour_is_refused_by_name(model: str, field: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        parse(model, **{field: value})
    message = str(refused.value)
    assert f"config.json: {field}={value!r}: {reason} in the native {PUBLISHED[model]['model_type']} family" in message


def test_a_part_of_a_head_that_is_no_even_number_of_features_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim=80: .* needs an even number, and rotates 27 with 0\.34"):
        parse("phi-2", partial_rotary_factor=0.34)


@pytest.mark.parametrize("name", HF_ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    x = torch.linspace(-6.0, 6.0, 101)
    torch.testing.assert_close(ACTIVATIONS[HF_ACTIVATIONS[name]](x), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("own_norm", [False, True])
def test_parallel_blocks_read_what_enters_the_layer(own_norm: bool) -> None:
    norms = LayerNorms(before_feed_forward="post_attention_layernorm" if own_norm else None)
    small = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    layer = DecoderLayer(replace(parse("phi-2", **small, num_hidden_layers=1), norms=norms), 0, ModelOptions())
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    rotary = layer.rotary
    assert rotary is not None
    rotation = rotary_cos_sin(torch.arange(5), rotary, x.dtype)
    segments = Segments.of_sequences(torch.tensor([0, 5], dtype=torch.int32), [5])
    first, *others = layer.each_norm()
    with torch.no_grad():
        for other in others:
            other.get_parameter("weight").mul_(3.0)
        read = (others[0] if own_norm else first)(x)
        expected = x + layer.self_attn(first(x), rotation, segments) + layer.mlp(read, RouterInput())
        torch.testing.assert_close(layer(x, rotation, segments, RouterInput()), expected)
