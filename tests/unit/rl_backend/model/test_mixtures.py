"""Mixtures with routers of their own kinds: what their configurations say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from rl_backend.contracts import UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.experts import LIMIT, ClampedExperts
from rl_backend.primitive.rope import YarnScaling
from rl_backend.primitive.router import Routing
from tests.support.families import load_native, random_sequences, run_native
from tests.support.moe import MINIMAX_ROTARY, write_moe
from tests.support.native import open_runtime
from tests.unit.rl_backend.model.test_families import assert_equals_transformers, assert_is_saved_for_transformers

PUBLISHED: dict[str, dict[str, Any]] = {
    "GLM-4.5": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": True,
        "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "attn_type_list": [1] * 62,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
}


def parse(name: str, **changes: Any) -> DecoderSpec:
    config = {**PUBLISHED[name], **changes}
    decoder = find_model("auto", config).parse_config(config)
    assert isinstance(decoder, DecoderSpec)
    return decoder


def blocks(decoder: DecoderSpec, layer: int = -1) -> tuple[GQASpec, MoESpec]:
    mixer, mixture = decoder.layers[layer]
    assert isinstance(mixer, GQASpec)
    assert isinstance(mixture, MoESpec)
    return mixer, mixture


def test_a_published_minimax_m2_is_read_with_its_rotary_features() -> None:
    decoder = parse("MiniMax-M2")
    mixer, mixture = blocks(decoder)
    assert (mixer.head_dim, mixer.rotary.head_dim, mixer.rotary.theta) == (128, 64, 5e6)
    assert mixer.joint_qk_norm and not mixer.qkv_bias
    router = mixture.router
    assert (router.score, router.expert_bias, router.normalise, router.scaling_factor) == ("sigmoid", True, True, 1.0)
    assert not router.rounded_logits, "engines compute them in float32"
    names = decoder.weight_names("log_probs")
    assert names["layers.61.mlp.gate.expert_bias.values"] == "model.layers.61.block_sparse_moe.e_score_correction_bias"
    assert blocks(parse("MiniMax-M2", head_dim=44, rotary_dim=30))[0].rotary.head_dim == 30


def test_a_published_glm_is_read_with_its_dense_layers_and_half_of_a_head() -> None:
    decoder = parse("GLM-4.5")
    mixer, mixture = blocks(decoder)
    assert decoder.sparse == (False,) * 3 + (True,) * 89
    assert (mixer.head_dim, mixer.rotary.head_dim) == (128, 64)
    assert mixer.qk_norm and not mixer.joint_qk_norm and mixer.qkv_bias and not mixer.output_bias
    assert (mixture.router.num_experts, mixture.router.scaling_factor, mixture.shared_intermediate_size) == (160, 2.5, 1536)
    family = find_model("auto", PUBLISHED["GLM-4.5"])
    assert family.kept_prefixes(decoder) == ("model.layers.92.",)
    # Behind dense layers alone there is a mixture too.
    assert decoder.mtp is not None and parse("GLM-4.5", first_k_dense_replace=92).mtp == decoder.mtp
    assert parse("GLM-4.5", num_nextn_predict_layers=0).mtp is None
    with pytest.raises(UnsupportedError, match="num_nextn_predict_layers=2: only 0 or 1 is implemented"):
        parse("GLM-4.5", num_nextn_predict_layers=2)
    plain = blocks(parse("GLM-4.5", use_qk_norm=None, attention_bias=None))[0]
    assert not plain.qk_norm and not plain.qkv_bias


@pytest.mark.shows("model: the layer of GLM-4.5 for multi-token prediction is kept byte for byte in a saved model")
def test_the_layer_for_multi_token_prediction_is_kept(tmp_path: Path) -> None:
    path = write_moe("glm4_moe", tmp_path / "model", max_shard_size="1GB")
    tensors = load_file(path / "model.safetensors")
    kept = {f"model.layers.3.{name}": torch.randn(5, 7).bfloat16() for name in ("eh_proj.weight", "enorm.weight")}
    save_file({**tensors, **kept}, path / "model.safetensors", metadata={"format": "pt"})
    with open_runtime(path) as runtime:
        runtime.save_checkpoint(runtime.build_model(), tmp_path / "saved", hf=True)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {*tensors, *kept}
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept.items())


def test_a_published_gpt_oss_is_read_with_its_windows_and_angles() -> None:
    decoder = parse("gpt-oss-20b")
    near, whole = blocks(decoder, 0)[0], blocks(decoder, 1)[0]
    assert (near.window, whole.window) == (128, None) and near.sinks and near.qkv_bias and near.output_bias
    assert isinstance(near.rotary.scaling, YarnScaling) and not near.rotary.scaling.truncate
    assert near.rotary.scaling.attention_factor == pytest.approx(1.3466, abs=1e-4)
    assert decoder.max_length == 131072
    router = blocks(decoder)[1].router
    assert (router.top_k, router.score_after_top_k, router.bias) == (4, True, True)
    names = decoder.weight_names("log_probs")
    assert names["layers.23.mlp.gate.bias"] == "model.layers.23.mlp.router.bias"
    assert names["layers.23.mlp.experts.down_proj_bias"] == "model.layers.23.mlp.experts.down_proj_bias"


@pytest.mark.shows("model: rotary_dim of MiniMax-M2, which transformers ignores, says how many features of a head rotate")
def test_rotary_dim_is_the_part_that_the_rotary_parameters_may_say(tmp_path: Path) -> None:
    """The reference, which equals transformers, has the part in its rotary parameters."""
    paths = [write_moe("minimax_m2", tmp_path / name) for name in ("part", "dim", "all")]
    whole = {name: value for name, value in MINIMAX_ROTARY.items() if name != "partial_rotary_factor"}
    for path, changes in zip(paths, ({}, {"rotary_dim": 16}, {}), strict=True):
        config = json.loads((path / "config.json").read_text())
        rotary = config["rope_parameters"] if path.name == "part" else whole
        (path / "config.json").write_text(json.dumps({**config, "rope_parameters": rotary, **changes}))
    with torch.no_grad():
        part, dim, all_ = (run_native(load_native(path), random_sequences((40,))).log_probs for path in paths)
    assert torch.equal(part, dim)
    assert float((part - all_).abs().max()) > 0.01


OTHERS: dict[str, dict[str, Any]] = {
    "windows and whole attention": {},
    "one head of keys, no biases": {"num_key_value_heads": 1, "attention_bias": False},
    "windows everywhere": {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5},
    "tied, other angles": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


@pytest.mark.shows("model: gpt-oss equals transformers' log-probs and gradients to 1e-5, sinks, windows and biases included")
@pytest.mark.parametrize("case", OTHERS)
def test_gpt_oss_equals_transformers(tmp_path: Path, case: str) -> None:
    assert_equals_transformers(write_moe("gpt_oss", tmp_path / "model", **OTHERS[case]))


@pytest.mark.shows("model: gpt-oss is trained, exported bit-equal and loaded by transformers")
def test_a_trained_gpt_oss_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path) -> None:
    assert_is_saved_for_transformers(write_moe("gpt_oss", tmp_path / "model"), tmp_path / "saved", steps=3)


def test_gates_are_clamped_as_in_transformers() -> None:
    """Values on both sides of every limit, hidden and intermediate features of different numbers."""
    num_experts, hidden, intermediate, tokens = 5, 12, 20, 40
    config = AutoConfig.for_model(
        "gpt_oss", num_local_experts=num_experts, hidden_size=hidden, intermediate_size=intermediate
    )
    config._experts_implementation = "eager"
    reference, found = GptOssExperts(config).double(), ClampedExperts(num_experts, hidden, intermediate).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in found.named_parameters():
        with torch.no_grad():
            parameter.copy_(1.5 * torch.randn(parameter.shape, generator=generator))
            reference.get_parameter(name).copy_(parameter)
    chosen = torch.rand(tokens, num_experts, generator=generator).topk(2).indices
    chosen[chosen == 3] = 4  # an expert without tokens, and tokens with one expert twice
    weights = torch.rand(tokens, 2, generator=generator).double()
    x = torch.randn(tokens, hidden, generator=generator).double()
    results = []
    for experts in (reference, found):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if experts is reference:
            out = experts(inputs[0], chosen, inputs[1])
        else:
            out = experts(inputs[0], Routing(chosen, inputs[1], torch.empty(0)))
        gradients = torch.autograd.grad(out.square().sum(), (*inputs, *experts.parameters()))
        results.append((out, *gradients))
    torch.testing.assert_close(results[1], results[0])
    gates = x @ found.gate_up_proj[0] + found.gate_up_proj_bias[0]
    assert bool((gates > LIMIT).any()) and bool((gates < -LIMIT).any())


@pytest.mark.parametrize(
    ("model", "field", "value", "reason"),
    [
        ("GLM-4.5", "scoring_func", "softmax", "only 'sigmoid' is implemented"),
        ("GLM-4.5", "topk_group", 2, "there are n_group=1"),
        ("gpt-oss-20b", "swiglu_limit", 5.0, "only 7.0 is implemented"),
        ("gpt-oss-20b", "experts_per_token", 2, "num_experts_per_tok is 4; make them the same"),
        ("gpt-oss-20b", "hidden_act", "gelu", "only 'silu' is implemented"),
        ("MiniMax-M2", "scoring_func", "softmax", "only 'sigmoid' is implemented"),
        ("MiniMax-M2", "attn_type_list", [0] + [1] * 61, "only 1, softmax attention, is implemented"),
        ("MiniMax-M2", "use_qk_norm", False, "only True is implemented"),
        ("MiniMax-M2", "use_routing_bias", False, "only True is implemented"),
        ("MiniMax-M2", "shared_intermediate_size", 512, "only 0 is implemented"),
        ("MiniMax-M2", "rotary_dim", 256, "expected an even number, at most the 128 features of a head"),
        ("MiniMax-M2", "rotary_dim", 63, "expected an even number, at most the 128 features of a head"),
    ],
)
def test_what_a_family_does_not_honour_is_refused_by_name(model: str, field: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        parse(model, **{field: value})
    message = str(refused.value)
    assert f"config.json: {field}={value!r}: {reason} in the native {PUBLISHED[model]['model_type']} family" in message


def test_two_numbers_of_rotated_features_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="rotary_dim=64: partial_rotary_factor rotates 32 features; make them the same"
    ):
        parse("MiniMax-M2", partial_rotary_factor=0.25)
