"""DeepSeek-V3 and its kin train as transformers does, within the tolerances of the parity command."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_backend.lab.parity.config import ParitySide
from tests.support.deepseek import write_latent
from tests.unit.rl_backend.lab.test_parity_faults import compare_on, make_config, train_runtime, train_transformers


@pytest.mark.shows("parity: DeepSeek-V3 and GLM-4.7-Flash: native and transformers train alike for 20 steps")
@pytest.mark.parametrize(
    ("model", "steps"),
    [
        ("deepseek_v3", 5),
        *(
            pytest.param(model, 20, marks=pytest.mark.long)
            for model in ("deepseek_v3", "deepseek_v3, YaRN, one latent, values wider than keys", "glm4_moe_lite")
        ),
    ],
)
def test_native_and_transformers_train_alike(tmp_path: Path, model: str, steps: int) -> None:
    path = write_latent(model, tmp_path / "model")
    config = make_config(path, ParitySide(runtime="native"), lr=1e-4, steps=steps, num_sequences=8, max_length=100)
    comparison = compare_on(path, train_transformers(config), train_runtime(config))
    assert comparison.first_divergence is None, comparison.first_divergence
    assert comparison.max_loss_difference < 1e-6
    assert comparison.max_grad_norm_difference < 1e-5
    assert comparison.loss_fall > 0.0005 * steps
