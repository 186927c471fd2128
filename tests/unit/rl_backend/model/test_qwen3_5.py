"""Qwen3.5, dense and as a mixture, and Qwen3-Next against transformers'; what their directories say and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.model import find_model
from tests.support.families import load_native, load_transformers, random_sequences, run_native, run_transformers
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next

LENGTHS = (7, 1, 100, 64, 65, 33, 150)
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_5": write_qwen3_5,
    "qwen3_5_moe": lambda path: write_qwen3_5(path, moe=True),
    "qwen3_next": write_qwen3_next,
    "qwen3_next, dense layers between": lambda path: write_qwen3_next(path, decoder_sparse_step=2, norm_topk_prob=False),
    "qwen3_5, wide values, a wider convolution": lambda path: write_qwen3_5(
        path, linear_num_value_heads=6, linear_value_head_dim=32, linear_conv_kernel_dim=6, tie_word_embeddings=False
    ),
}


def gradients_by_transformers_name(path: Path, native: nn.Module) -> dict[str, Tensor]:
    """In the shapes of transformers' parameters in memory, where experts are packed."""
    config = read_hf_config(path)
    family = find_model("auto", config)
    names = family.weight_names(family.parse_config(config), "log_probs")
    found = {}
    for name, parameter in native.named_parameters():
        stored = names[name]
        assert parameter.grad is not None, name
        gradient = parameter.grad.flatten(1, 2) if name.endswith("gate_up_proj") else parameter.grad
        found[stored if isinstance(stored, str) else f"model.{name}"] = gradient
    return found


@pytest.mark.shows("model: Qwen3.5, dense and mixture, and Qwen3-Next equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_and_gradients_equal_transformers_packed_and_alone(tmp_path: Path, model: str) -> None:
    path = MODELS[model](tmp_path / "model")
    sequences = random_sequences(LENGTHS)
    mix = torch.randn(2, sum(LENGTHS), generator=torch.Generator().manual_seed(0))
    reference = load_transformers(path)
    expected = run_transformers(reference, sequences, 0.8)
    ((expected.log_probs * mix[0]).sum() + (expected.entropy * mix[1]).sum()).backward()
    gradients = dict(reference.named_parameters())
    native = load_native(path)
    packed = [run_native(native, sequences, 0.8)]
    alone = [run_native(native, [sequence], 0.8) for sequence in sequences]
    for outputs in (packed, alone):
        native.zero_grad()
        log_probs, entropy = (torch.cat([getattr(out, name) for out in outputs]) for name in ("log_probs", "entropy"))
        torch.testing.assert_close(log_probs, expected.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected.entropy, atol=1e-5, rtol=0)
        ((log_probs * mix[0]).sum() + (entropy * mix[1]).sum()).backward()
        found = gradients_by_transformers_name(path, native)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            scale = float(gradients[name].grad.abs().max())
            assert scale > 0.0, name
            difference = float((gradient - gradients[name].grad).abs().max()) / scale
            assert difference < 1e-5, f"{name}: {difference}"
