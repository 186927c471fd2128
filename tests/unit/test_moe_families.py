"""Families with mixtures of experts against transformers': log-probs, gradients, names, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.families import load_native, load_transformers, random_sequences, run_native, run_transformers
from tests.support.moe import MODELS, gradients_in_transformers_names, write_moe

LENGTHS = (7, 1, 100, 33, 33, 60)


@pytest.mark.shows("model: Qwen3-MoE and Mixtral equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path, model: str) -> None:
    path = write_moe(model, tmp_path / "model")
    sequences = random_sequences(LENGTHS)
    mix = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    native, reference = load_native(path), load_transformers(path)
    outputs = [run_native(native, sequences, 0.8), run_transformers(reference, sequences, 0.8)]
    torch.testing.assert_close(outputs[0].log_probs, outputs[1].log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs[0].entropy, outputs[1].entropy, atol=1e-5, rtol=0)
    for output in outputs:
        ((output.log_probs * mix[0]).sum() + (output.entropy * mix[1]).sum()).backward()
    found, expected = gradients_in_transformers_names(native), dict(reference.named_parameters())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].grad.abs().max())
        torch.testing.assert_close(
            gradient, expected[name].grad, atol=1e-5 * scale, rtol=0, msg=lambda message, name=name: f"{name}: {message}"
        )
