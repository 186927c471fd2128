"""Random stacks of gated DeltaNet: what is drawn, and what a trial asks of the runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks import parity_random, report
from benchmarks.parity_random import TRIALS, run_random
from benchmarks.random_hybrids import DENSE, MIXTURES, draw_hybrid
from benchmarks.random_models import RandomModel, write_model

SEEDS = range(200)
MODELS = [draw_hybrid(seed) for seed in SEEDS]
SETTINGS = [model.settings for model in MODELS]


def test_a_seed_determines_the_shape_and_odd_seeds_give_mixtures() -> None:
    assert [draw_hybrid(seed) for seed in SEEDS] == MODELS
    assert [model.is_mixture for model in MODELS] == [bool(seed % 2) for seed in SEEDS]
    assert {model.family for model in MODELS} == {*DENSE, *MIXTURES}
    assert len(set(map(str, SETTINGS))) == len(SEEDS)


def test_every_stack_has_gated_deltanet_and_most_have_attention_too() -> None:
    kinds = [fields["layer_types"] for fields in SETTINGS]
    assert all("linear_attention" in each for each in kinds)
    assert sum("full_attention" in each for each in kinds) > len(kinds) / 2
    assert any(each[0] == "full_attention" for each in kinds), "in other orders than the released one"


def test_sizes_are_odd_and_fit_each_other() -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "shared_expert_intermediate_size",
    ):
        assert any(fields[name] % 2 for fields in SETTINGS if name in fields), name
    for fields in SETTINGS:
        assert fields["linear_num_value_heads"] % fields["linear_num_key_heads"] == 0
        rotated = fields["head_dim"] * fields["rope_parameters"]["partial_rotary_factor"]
        assert rotated == int(rotated) and rotated % 2 == 0


def test_transformers_takes_every_shape() -> None:
    for model in MODELS:
        AutoConfig.for_model(model.family, **model.settings)


def test_decays_are_such_that_states_last(tmp_path: Path) -> None:
    weights = load_file(write_model(draw_hybrid(0), 0, tmp_path) / "model.safetensors")
    decays = {name: tensor for name, tensor in weights.items() if name.endswith("A_log")}
    assert decays and all(float(tensor.min()) >= -3.0 and float(tensor.max()) <= 1.0 for tensor in decays.values())
    assert not any(bool((tensor == 1.0).any()) for name, tensor in weights.items() if name.endswith("dt_bias"))


def test_a_runtime_that_is_not_required_is_tried_on_every_shape_and_may_refuse_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[list[str]] = []

    def compare(model: RandomModel, seed: int, runtimes: list[str], lengths: tuple[int, int]) -> dict[str, Any]:
        tried.append(runtimes)
        assert lengths == (1, 150)
        passed = {"outcome": "passed", "max_loss_rel_diff": 0.0, "max_grad_norm_rel_diff": 0.0, "loss_fall": 0.1}
        return {name: passed if name == "native" else {"outcome": "refused", "refusal": "no"} for name in runtimes}

    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(parity_random, "compare_shape", compare)
    assert run_random(3, go_on=False, trial=TRIALS["hybrids"]._replace(required=("native",)))
    assert tried == [["native", "bridge"]] * 3
    found = report.read_result("families")["random_shapes"]
    assert found["accepted"] == {"native": 3, "bridge": 0} and len(found["refusals"]["bridge"]) == 3
