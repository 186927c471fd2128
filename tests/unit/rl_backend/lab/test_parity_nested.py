"""Comparisons of a language model that its directory nests beside a vision tower."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.parity.compare import Tolerances
from rl_backend.lab.parity.config import ParitySide
from rl_backend.lab.parity.run import compare_sides
from tests.support.qwen3_5 import save_text_model, write_qwen3_5
from tests.unit.rl_backend.lab.test_parity_faults import make_config, train_runtime, train_transformers

LORA = LoRAConfig(rank=4, targets=("attention", "feed_forward"))


@pytest.mark.shows("parity: a released Qwen3.5 is compared under the names of its files, with LoRA and without")
@pytest.mark.parametrize(
    ("taken_out", "lora"),
    [(False, None), pytest.param(False, LORA, marks=pytest.mark.long), pytest.param(True, None, marks=pytest.mark.long)],
    ids=["whole", "lora", "saved by transformers"],
)
def test_a_released_model_trains_as_transformers_does(tmp_path: Path, taken_out: bool, lora: LoRAConfig | None) -> None:
    model = write_qwen3_5(tmp_path / "model", released=True)
    if taken_out:
        model = save_text_model(model, tmp_path / "text")
    config = make_config(model, ParitySide(runtime="native"), lora=lora, max_length=100, steps=2)
    reference, candidate = train_transformers(config), train_runtime(config)
    found = compare_sides(config, reference, candidate, Tolerances.of("float32"))
    assert found.first_divergence is None, str(found.first_divergence)
    assert found.max_loss_difference < 1e-6
    assert found.max_grad_norm_difference < 1e-5
    # Four layers, their norms and both blocks of each.
    assert {stage.stage: stage.compared for stage in found.stages}["activations"] >= 4 * 5
