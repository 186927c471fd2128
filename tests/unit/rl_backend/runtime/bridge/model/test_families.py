"""What Megatron computes from a Hugging Face directory equals transformers, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import PackedBatch, RLBackendError, UnsupportedError
from tests.support.bridge_runs import open_bridge
from tests.support.deepseek import change_config, write_latent
from tests.support.families import load_transformers, pack, random_sequences, run_transformers
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.sparse_models import write_sparse

LENGTHS = (7, 1, 240, 33, 33, 130)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
NO_HEAD_DIM = {"head_dim": None}

EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", NO_HEAD_DIM),
    "qwen2, untied": ("qwen2", {**NO_HEAD_DIM, "tie_word_embeddings": False}),
    "qwen2, yarn": ("qwen2", {**NO_HEAD_DIM, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    # Sequences are as long as the scaling makes the 32 positions, as engines and the native runtime take them.
    "qwen3, linear": ("qwen3", {"rope_parameters": LINEAR, "max_position_embeddings": 32}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN, "max_position_embeddings": 32}),
    "llama": ("llama", {}),
    "llama, heads wider than the hidden state": ("llama", {"head_dim": 64}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, llama3 with a factor that is not Megatron's own": ("llama", {"rope_parameters": {**LLAMA3, "factor": 32.0}}),
    "mistral, window of 5": ("mistral", {"sliding_window": 5}),
    "mistral, narrow heads, one key head": ("mistral", {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": None}),
}
MIXTURES = ("qwen3_moe", "qwen3_moe, weights not normalised", "qwen3_moe, experts without tokens")

REFUSED: dict[str, tuple[str, dict[str, Any], type[RLBackendError], str]] = {
    "another llama3": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}},
        UnsupportedError,
        "rope parameters",
    ),
    "llama3 in qwen3": ("qwen3", {"rope_parameters": LLAMA3}, UnsupportedError, "rope parameters"),
    "yarn with a factor of its own": (
        "qwen3",
        {"rope_parameters": {**YARN, "attention_factor": 1.5}},
        UnsupportedError,
        "rope parameters",
    ),
    "yarn in mistral": ("mistral", {"rope_parameters": YARN}, UnsupportedError, "cannot read the configuration"),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}, UnsupportedError, "bias"),
    "windows in some layers": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        UnsupportedError,
        "sliding_window=20",
    ),
    "a family without a bridge": ("gpt_neox", {}, UnsupportedError, "no bridge for model_type='gpt_neox'"),
}


def assert_equals_transformers(path: Path) -> None:
    sequences = random_sequences(LENGTHS)
    expected = run_transformers(load_transformers(path), sequences, 0.8)
    packed = pack(sequences)
    batch = PackedBatch(packed.input_ids, packed.seq_lens, meta={"temperature": 0.8, "calculate_entropy": True})
    with open_bridge(path) as runtime:
        handle = runtime.build_model(forward_only=True)
        result = runtime.forward_backward(handle, [batch], None, forward_only=True)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(torch.cat(list(result.output(name))), getattr(expected, name), atol=1e-5, rtol=0)


@pytest.mark.shows("bridge: Qwen2, Qwen3, Llama, Mistral and Qwen3-MoE equal transformers' log-probs to 1e-5")
@pytest.mark.parametrize(
    "case",
    sampled(
        EQUAL,
        *("qwen2, untied", "qwen3", "qwen3, yarn", "llama, heads wider than the hidden state", "llama, llama3"),
        *("mistral, window of 5", "mistral, narrow heads, one key head"),
    ),
)
def test_a_dense_family_equals_transformers(case: str, tmp_path: Path) -> None:
    family, changes = EQUAL[case]
    assert_equals_transformers(write_tiny(family, tmp_path / "model", **changes))


@pytest.mark.parametrize("case", sampled(MIXTURES, "qwen3_moe, weights not normalised"))
def test_a_mixture_of_experts_equals_transformers(case: str, tmp_path: Path) -> None:
    assert_equals_transformers(write_moe(case, tmp_path / "model"))


def build(path: Path, **settings: Any) -> None:
    with open_bridge(path, **settings) as runtime:
        runtime.build_model(forward_only=True)


@pytest.mark.shows("bridge: what Megatron-Bridge would ignore in config.json or the weights is refused")
@pytest.mark.parametrize("case", REFUSED)
def test_what_megatron_would_ignore_is_refused(case: str, tmp_path: Path) -> None:
    family, changes, error, message = REFUSED[case]
    path = write_tiny(family, tmp_path / "model", **changes)
    with pytest.raises(error, match=message):
        build(path)


def test_dense_layers_between_those_with_experts_are_refused(tmp_path: Path) -> None:
    message = r"decoder_sparse_step=2, mlp_only_layers=\[3\]: layers \[0, 2, 3\] have no experts"
    with pytest.raises(UnsupportedError, match=message):
        build(write_moe("qwen3_moe, dense layers between", tmp_path / "model"))


@pytest.mark.shows("bridge: sparse attention of GLM-5 is refused by name, before Megatron-Bridge reads anything else")
@pytest.mark.parametrize("fields", [{}, {"first_k_dense_replace": 1, "indexer_rope_interleave": True}], ids=str)
def test_sparse_attention_is_refused_by_name(fields: dict[str, Any], tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "model", "glm_moe_dsa", indexer_types=["full", "full"])
    change_config(path, **fields)
    with pytest.raises(UnsupportedError, match=r"index_topk=6, sparse attention.*the native runtime may serve it"):
        build(path)


def test_a_family_that_transformers_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    path = write_latent("kimi_k2", tmp_path / "model")
    with pytest.raises(UnsupportedError, match=r"for model_type='kimi_k2' .*; backend='native' may serve it"):
        build(path)


def test_padding_counts_in_no_router_loss(tmp_path: Path) -> None:
    """The z-loss is a mean over tokens: of a padded micro-batch, the mean over its sequences, weighted by their tokens."""
    path = write_moe("qwen3_moe", tmp_path / "model")
    sequences = [*random_sequences((9, 9)), *random_sequences((40,), seed=1)]

    def gradient(packed: PackedBatch, **overrides: Any) -> torch.Tensor:
        with open_bridge(path, override_transformer_config=overrides) as runtime:
            handle = runtime.build_model()
            runtime.forward_backward(handle, [packed], lambda output, *_: (output.log_probs.sum() * 0.0, {}))
            return dict(runtime.export_gradients(handle))["model.layers.0.mlp.gate.weight"].clone()

    z_loss: Mapping[str, Any] = {"moe_z_loss_coeff": 0.01}
    assert not gradient(pack(sequences)).any()
    assert gradient(pack(sequences), moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1).any()
    parts = [gradient(pack([sequence]), **z_loss) * len(sequence) for sequence in sequences]
    torch.testing.assert_close(gradient(pack(sequences), **z_loss), torch.stack(parts).sum(0) / 58, rtol=1e-4, atol=1e-8)


def test_an_expert_in_a_module_of_its_own_has_the_weights_of_grouped_ones() -> None:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping, GatedMLPMapping

    from rl_backend.runtime.bridge.model.loading import _with_single_experts

    layer, single = "decoder.layers.*.mlp.experts", "decoder.layers.*.mlp.experts.local_experts.*"
    stored = {part: f"model.layers.*.mlp.experts.*.{part}_proj.weight" for part in ("gate", "up", "down")}
    grouped = [
        GatedMLPMapping(f"{layer}.linear_fc1.weight*", stored["gate"], stored["up"]),
        AutoMapping(f"{layer}.linear_fc2.weight*", stored["down"]),
        AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ]
    expected: dict[str, Any] = {
        **{each.megatron_param: each.hf_param for each in grouped},
        f"{single}.linear_fc1.weight": {"gate": stored["gate"], "up": stored["up"]},
        f"{single}.linear_fc2.weight": stored["down"],
    }
    found = _with_single_experts(grouped)
    assert {each.megatron_param: each.hf_param for each in found} == expected and len(found) == 5
    # A family that names both keeps its own.
    assert _with_single_experts(found) == found
