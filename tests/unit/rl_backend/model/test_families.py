"""Qwen2, Llama, Mistral and Qwen3 against transformers: log-probs, gradients, names; every rotary embedding and window."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.model import find_model
from tests.support.critic import transformers_values, write_critic
from tests.support.families import (
    Float64Gradients,
    load_native,
    load_transformers,
    mixed_outputs,
    random_sequences,
    run_native,
    run_transformers,
)
from tests.support.models import write_tiny
from tests.support.native import micro_batches, open_runtime, token_loss

FAMILIES = ("qwen2", "llama", "mistral", "qwen3")
LENGTHS = (7, 1, 240, 33, 33, 130)
ORIGINAL = 32
"""Original context of the scaled embeddings, which most of ``LENGTHS`` exceed."""

ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads wider than the hidden state": ("llama", {"head_dim": 64}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral, narrow heads, one key head": ("mistral", {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "mistral, window of 5": ("mistral", {"sliding_window": 5}),
    "mistral, window of 100": ("mistral", {"sliding_window": 100}),
    "mistral, window beyond its positions": ("mistral", {"sliding_window": 4096}),
    "qwen2, window from layer 1": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3, window by layer type": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
_BASE: dict[str, Any] = {"max_position_embeddings": 256, "tie_word_embeddings": False}
_OWN: dict[str, dict[str, Any]] = {"qwen2": {"head_dim": None}, "mistral": {"sliding_window": None}}


def write(family: str, path: Path, **changes: Any) -> Path:
    return write_tiny(family, path, **{**_BASE, **_OWN.get(family, {}), **changes})


def assert_equals_transformers(path: Path) -> None:
    """Log-probs, entropy and every gradient."""
    sequences = random_sequences(LENGTHS)
    mix = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    native, reference = load_native(path), load_transformers(path)
    outputs = [run_native(native, sequences, 0.8), run_transformers(reference, sequences, 0.8)]
    torch.testing.assert_close(outputs[0].log_probs, outputs[1].log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[0].entropy, outputs[1].entropy, atol=1e-5, rtol=0)
    for output in outputs:
        ((output.log_probs * mix[0]).sum() + (output.entropy * mix[1]).sum()).backward()
    config = read_hf_config(path)
    family = find_model("auto", config)
    names = family.weight_names(family.parse_config(config), "log_probs")
    expected = dict(reference.named_parameters())
    assert set(names.values()) == set(expected)
    exact = Float64Gradients(path, partial(mixed_outputs, sequences=sequences, mix=mix))
    for name, parameter in native.named_parameters():
        assert torch.equal(parameter, expected[names[name]])
        exact.assert_close(names[name], parameter.grad, expected[names[name]].grad)


@pytest.mark.shows("model: Qwen2, Llama, Mistral and Qwen3 equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.shows(
    "model: default, linear, llama3 and YaRN rotary embeddings equal transformers', beyond the original context"
)
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path, family: str, rotary: str) -> None:
    assert_equals_transformers(write(family, tmp_path / "model", rope_parameters=dict(ROTARY[rotary])))


@pytest.mark.shows("model: sliding windows of Mistral and Qwen2, and Llama's biases, equal transformers")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_transformers(tmp_path: Path, layout: str) -> None:
    family, changes = LAYOUTS[layout]
    assert_equals_transformers(write(family, tmp_path / "model", **changes))


def test_a_scaled_embedding_is_another_than_the_original(tmp_path: Path) -> None:
    sequences = random_sequences(LENGTHS)
    found = []
    for rotary in ("linear", "llama3", "yarn"):
        pair = []
        for kind in (rotary, "default"):
            parameters = {**ROTARY[kind], "rope_theta": ROTARY[rotary]["rope_theta"]}
            path = write("llama", tmp_path / f"{rotary}-{kind}", rope_parameters=parameters)
            with torch.no_grad():
                pair.append(run_native(load_native(path), sequences).log_probs)
        found.append(float((pair[0] - pair[1]).abs().max()))
    assert min(found) > 1e-2


@pytest.mark.shows("model: Qwen2, Llama, Mistral and Qwen3 are trained, exported bit-equal and loaded by transformers")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path, family: str) -> None:
    path = write(family, tmp_path / "model", rope_parameters=dict(ROTARY["yarn"]))
    assert_is_saved_for_transformers(path, tmp_path / "saved", steps=6)


def assert_is_saved_for_transformers(path: Path, saved: Path, steps: int) -> None:
    """Exported bit-equal, trained for ``steps``, and saved as a model that transformers reads as what it is."""
    stored = dict(load_transformers(path).named_parameters())
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        exported = dict(runtime.export_weights(handle))
        assert exported.keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in exported.items())
        data = micro_batches([[0, 1, 2, 3], [4, 5, 6, 7]])
        losses = []
        for _ in range(steps):
            runtime.zero_grad(handle)
            losses.append(runtime.forward_backward(handle, data, token_loss).loss)
            assert runtime.optimizer_step(handle).ok
        assert losses == sorted(losses, reverse=True)
        runtime.save_checkpoint(handle, saved, hf=True)
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        native = run_native(load_native(saved), sequences)
        reference = run_transformers(load_transformers(saved), sequences)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)


@pytest.mark.shows("critic: Qwen2, Llama, Mistral, Qwen3, Gemma, Phi and StarCoder 2 can have a value head")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_critics_that_equal_transformers_before_and_after_saving(tmp_path: Path, family: str) -> None:
    path = write_critic(tmp_path / "critic", write(family, tmp_path / "model"))
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        values = run_native(load_native(path, head="values"), sequences).values
    torch.testing.assert_close(values, transformers_values(path, sequences), atol=1e-5, rtol=0)
    with open_runtime(path) as runtime:
        runtime.save_checkpoint(runtime.build_model(head="values"), tmp_path / "saved", hf=True)
    assert torch.equal(transformers_values(tmp_path / "saved", sequences), transformers_values(path, sequences))
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved")
    assert type(saved).__name__ in read_hf_config(tmp_path / "saved")["architectures"]
