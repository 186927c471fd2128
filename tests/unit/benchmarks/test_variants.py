"""The comparison of families that are Llama but for some fields covers all of them, and what it found holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.parity import SIZES
from benchmarks.report import RESULTS, read_result
from benchmarks.variants import FAMILIES, STEPS, figures, model_of
from rl_backend.model.families import dense as variants


def test_every_family_of_the_module_is_compared() -> None:
    assert list(FAMILIES) == re.findall(r'decoder_family\("(\w+)"', Path(variants.__file__).read_text())


def test_a_family_replaces_sizes_or_leaves_them_out() -> None:
    model = model_of("granite")
    assert (model.family, model.settings["logits_scaling"], model.settings["hidden_size"]) == ("granite", 0.5, 128)
    assert "head_dim" in SIZES and "head_dim" not in model.settings
    assert model.settings["pad_token_id"] is None


def test_the_verdict_of_the_command_is_kept_with_its_figures() -> None:
    numbers = {"dtype": "float32", "max_loss_rel_diff": 1e-7, "max_grad_norm_rel_diff": 1e-6, "loss_fall": 0.2}
    stages = [{"ends_elsewhere": []}, {"ends_elsewhere": [{"name": "model.embed_tokens", "amount": 0.9}]}]
    found = figures({**numbers, "first_divergence": None, "stages": stages, "steps": [{"step": 0}]})
    assert found == {**numbers, "first_divergence": None, "ends_elsewhere": ["model.embed_tokens"]}


@pytest.mark.skipif(not (RESULTS / "variants.json").exists(), reason="has not been measured")
def test_the_command_found_every_family_within_its_tolerances() -> None:
    result = read_result("variants")
    assert (list(result["families"]), result["within_tolerances"]) == (list(FAMILIES), len(FAMILIES))
    for family, found in result["families"].items():
        assert found["command"] == f"rl-backend parity --model {family} --steps {STEPS} --json {family}.json"
        assert (found["status"], found["first_divergence"]) == (0, None)
        assert found["verdict"] == "no divergence: all within the tolerances"
