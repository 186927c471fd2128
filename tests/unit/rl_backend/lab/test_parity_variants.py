"""Parity of families whose modules end elsewhere than in transformers: what is computed counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.parity.compare import Comparison, SideRecord, StageResult, Tolerances, compare
from rl_backend.lab.parity.config import DType, ParitySide
from tests.support.matrix import sampled
from tests.support.variants import VARIANTS, write_variant
from tests.unit.rl_backend.lab.test_parity_faults import compare_on, make_config, train_runtime, train_transformers

REQUIRED = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")
INNER = "model.layers.1.mlp.down_proj"
MODULES = ("model.embed_tokens", "model.layers.0", INNER, "model.layers.1", "model.norm")


def activations_of(comparison: Comparison) -> StageResult:
    return next(stage for stage in comparison.stages if stage.stage == "activations")


@pytest.mark.shows(
    "parity: Gemma 1 and 3, Granite, Nemotron, OLMo 2, Phi and StarCoder 2 train as in transformers, in float32"
)
@pytest.mark.parametrize("family", sampled(VARIANTS, "gemma3_text", "phi"))
def test_variants_of_llama_train_as_in_transformers(tmp_path: Path, family: str) -> None:
    model = write_variant(family, tmp_path, pad_token_id=7)
    config = make_config(model, ParitySide(runtime="native"), lr=1e-4)
    comparison = compare_on(model, train_transformers(config), train_runtime(config))
    assert comparison.first_divergence is None, str(comparison.first_divergence)
    assert comparison.max_loss_difference < 1e-6
    assert comparison.max_grad_norm_difference < 1e-5
    assert comparison.loss_fall > 0.01
    # transformers scales Gemma's embeddings inside of their module.
    elsewhere = [difference.name for difference in activations_of(comparison).ends_elsewhere]
    assert elsewhere == (["model.embed_tokens"] if family.startswith("gemma") else [])


@pytest.mark.parametrize("family", sampled(["gemma", "olmo2", "phi"], "phi"))
def test_adapters_of_variants_train_as_with_peft(tmp_path: Path, family: str) -> None:
    model = write_variant(family, tmp_path, pad_token_id=7)
    targets = ("attention", "feed_forward", *(("head",) if family == "phi" else ()))
    config = make_config(model, ParitySide(runtime="native"), lora=LoRAConfig(rank=4, targets=targets), steps=2)
    comparison = compare_on(model, train_transformers(config), train_runtime(config))
    assert comparison.first_divergence is None, str(comparison.first_divergence)


def record(**outputs: Tensor) -> SideRecord:
    """A side whose every number is 1, but for outputs of modules and the gradient that are given."""
    ones = torch.ones(4, 8)
    activations = {name: outputs.get(name, ones) for name in MODULES}
    weights: Mapping[str, Any] = {name: {"w": ones} for name in ("loaded_weights", "weights")}
    gradients = {"w": outputs.get("gradient", ones)}
    return SideRecord(activations, torch.ones(4), [1.0, 1.0], [1.0, 1.0], gradients=gradients, **weights)


def compare_with(outputs: Mapping[str, Tensor], dtype: DType = "float32") -> Comparison:
    return compare(record(), record(**outputs), Tolerances.of(dtype), REQUIRED)


@pytest.mark.parametrize("module", ["model.embed_tokens", "model.layers.0", INNER, "model.norm"])
@pytest.mark.parametrize("change", ["factor", "bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_module_that_ends_elsewhere_is_named_and_is_no_divergence(module: str, change: str, dtype: DType) -> None:
    output = 0.25 * torch.ones(4, 8) if change == "factor" else torch.ones(4, 8) + torch.arange(8)
    comparison = compare_with({module: output}, dtype)
    assert comparison.first_divergence is None
    assert [difference.name for difference in activations_of(comparison).ends_elsewhere] == [module]


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param({INNER: 1.00005 * torch.ones(4, 8)}, id="a difference as small as that of an eps"),
        pytest.param({INNER: 5 * torch.ones(4, 8), "gradient": 1.01 * torch.ones(4, 8)}, id="with other gradients"),
        pytest.param({INNER: 5 * torch.ones(4, 8), "model.layers.1": 1.0001 * torch.ones(4, 8)}, id="with what follows"),
        pytest.param({INNER: torch.full((4, 8), torch.nan)}, id="not finite"),
        pytest.param({INNER: torch.ones(4, 9)}, id="another shape"),
    ],
)
def test_a_module_whose_results_differ_stays_a_divergence(outputs: dict[str, Tensor]) -> None:
    comparison = compare_with(outputs)
    assert comparison.first_divergence is not None
    assert (comparison.first_divergence.stage, comparison.first_divergence.difference.name) == ("activations", INNER)
    assert activations_of(comparison).ends_elsewhere == ()
