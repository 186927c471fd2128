"""Mixtures with routers of their own kinds: what their configurations say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.gqa import GQASpec
from tests.support.families import load_native, random_sequences, run_native
from tests.support.moe import MINIMAX_ROTARY, write_moe

PUBLISHED: dict[str, dict[str, Any]] = {
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
    names = decoder.weight_names("log_probs")
    assert names["layers.61.mlp.gate.expert_bias.values"] == "model.layers.61.block_sparse_moe.e_score_correction_bias"
    assert blocks(parse("MiniMax-M2", head_dim=44, rotary_dim=30))[0].rotary.head_dim == 30


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


@pytest.mark.parametrize(
    ("model", "field", "value", "reason"),
    [
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
