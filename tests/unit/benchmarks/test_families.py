"""The benchmark of the families: that none is left out, how parts are merged, and the page that is made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from actors.rollout.vllm.capabilities import REFUSALS
from benchmarks import families, family_loads, report
from benchmarks.capabilities import PAGE, page
from benchmarks.family_loads import WITH_BIASES
from benchmarks.family_models import FAMILIES, SAME_CODE, WITHOUT_SPEED, write_small
from benchmarks.family_parity import LENGTHS, layouts
from benchmarks.family_push import draw_tokens, is_good
from benchmarks.train_speed import LONGEST
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.model import find_model
from rl_backend.model.options import EXPERT_BIAS_OPTIONS

EXACT: dict[str, Any] = {
    "max_log_prob_diff": 2e-7,
    "max_gradient_rel_diff": 3e-6,
    "max_loss_rel_diff": 1e-7,
    "loss_fall": 0.2,
    "first_divergence": None,
}
REFUSED = {"refused": "MODEL: no such\n thing"}


def test_every_family_of_the_native_runtime_is_measured() -> None:
    # A process of its own: other tests register families too.
    code = "from rl_backend.model import MODEL_FAMILIES; print(*MODEL_FAMILIES)"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert sorted({*FAMILIES, *SAME_CODE}) == sorted(names)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_SPEED])
def test_both_models_of_a_family_are_transformers_and_ours(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    for size in ("small", "timed"):
        AutoConfig.for_model(family.model_type, **family.settings(size)).save_pretrained(tmp_path / size)
        config = read_hf_config(tmp_path / size)
        assert find_model("auto", config).name == name
        architecture = find_model("auto", config).parse_config(config)
        assert architecture.max_length >= LONGEST
        assert (architecture.routed_layers is not None) == family.is_mixture


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.corrected])
def test_a_family_without_a_right_reference_has_a_small_model_that_is_sparse_until_it_is_pushed(
    name: str, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    config = read_hf_config(write_small(family, tmp_path / "small"))
    assert find_model("auto", config).name == name
    assert config["index_topk"] < LENGTHS["max_length"]
    assert find_model("auto", config).parse_config(config).routed_layers is not None and family.is_mixture
    assert read_hf_config(write_small(family, tmp_path / "pushed", **family.pushed))["index_topk"] == 256


def test_a_mixture_is_also_spread_over_expert_ranks() -> None:
    assert any("ep" in side.layout for side in layouts(FAMILIES["qwen3_moe"]))
    assert not any("ep" in side.layout for side in layouts(FAMILIES["qwen3"]))
    names = [side.name for side in layouts(FAMILIES["qwen3"])]
    assert len(set(names)) == len(names)
    assert {"native pp=2 vpp=2 zbv", "native cp=2", "bridge tp=2"} <= set(names)


def test_a_small_model_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = (write_small(FAMILIES["qwen2"], tmp_path / name) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_a_part_replaces_its_own_earlier_result_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    families.record("qwen2", "parity", {"pairs": {"native": {**EXACT, "max_loss_rel_diff": float("inf")}}})
    families.record("qwen2", "speed", {"native_over_transformers": {"equal_lengths": 1.5}, "runs": 3})
    families.record("qwen3", "speed", {"native_over_transformers": {"equal_lengths": 2.5}, "runs": 3})
    families.record("qwen2", "speed", {"native_over_transformers": {"equal_lengths": 1.25}, "runs": 5})
    found = json.loads((tmp_path / "families.json").read_text())
    assert found["qwen2"]["native_over_transformers"] == {"equal_lengths": 1.25}
    assert found["qwen2"]["speed"] == {"runs": 5}
    assert found["qwen2"]["parity"]["pairs"]["native"]["max_loss_rel_diff"] is None
    assert found["qwen3"]["native_over_transformers"] == {"equal_lengths": 2.5}


def test_what_is_not_as_it_has_to_be_is_named() -> None:
    diverged = {**EXACT, "first_divergence": "loss (step 3)"}
    still = {**EXACT, "loss_fall": 0.0}
    cells = {"exact": EXACT, "refused": REFUSED, "diverged": diverged, "still": still, "failed": {"failed": "died"}}
    assert families.failures("parity", {"pairs": cells}) == ["diverged", "still", "failed"]
    assert families.failures("layouts", {"layouts": cells}) == ["diverged", "failed"]
    assert families.failures("push", {"dtypes": {"float32": {"mean_gap": 1e-4}, "bfloat16": REFUSED}}) == ["push"]


def test_gaps_of_a_push_are_bounded_in_both_dtypes() -> None:
    def good(exact: dict[str, Any], rounded: dict[str, Any]) -> bool:
        return is_good({"dtypes": {"float32": exact, "bfloat16": rounded}})

    small, usual = {"mean_gap": 1e-6}, {"mean_gap_over_transformers": 1.2}
    assert good(small, usual) and good(REFUSED, usual) and good(small, REFUSED)
    assert not good({"mean_gap": 2e-5}, usual)
    assert not good(small, {"mean_gap_over_transformers": 3.5})
    assert not good({"failed": "died"}, usual) and not good(small, {"failed": "died"})


def test_prompts_have_the_lengths_that_are_asked_for() -> None:
    rows = draw_tokens((1, 5, 60), 50, seed=0)
    assert list(map(len, rows)) == [1, 5, 60]
    assert all(0 <= token < 50 for row in rows for token in row)
    assert rows == draw_tokens((1, 5, 60), 50, seed=0)


def test_the_page_of_capabilities_is_the_one_that_the_results_make() -> None:
    assert PAGE.read_text() == page(report.read_result("families")), "run: python -m benchmarks.capabilities"


def test_what_vllm_cannot_serve_is_on_the_page_as_engines_refuse_it() -> None:
    text = page({})
    for refusal in REFUSALS:
        models = ", ".join(sorted(refusal.model_types)) or "all"
        assert f"| {models} | {refusal.device} | {refusal.what} | {refusal.measured} | {refusal.instead} |" in text


def test_the_page_numbers_refusals_and_says_of_which_families_they_are() -> None:
    parity = {"pairs": {"native": EXACT, "bridge": REFUSED}, "steps": 20, "lengths": {"min_length": 1, "max_length": 150}}
    text = page({"gemma": {"parity": parity}, "phi": {"parity": parity}, "llama": {"parity": parity | {"pairs": {}}}})
    assert "| gemma | 2e-07, 3e-06, 1e-07 | [1] | - |" in text
    assert "| llama | - | - | - |" in text
    assert "1. gemma, phi: MODEL: no such thing" in text
    assert "the first of 20 steps" in text


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ({}, ""),
        (
            {"on_their_choices": {"step": None}},
            "; on what transformers chose all steps are within the tolerances",
        ),
        (
            {"on_their_choices": {"step": 8}},
            "; on what transformers chose step 8 is the first that is not within the tolerances",
        ),
    ],
)
def test_the_page_marks_comparisons_that_part(again: dict[str, Any], said: str) -> None:
    parted = {**EXACT, "first_divergence": "loss (step 7): apart"}
    parity = {
        "pairs": {"native": {**parted, **again}, "bridge": {**EXACT, "loss_fall": 0.041}},
        "steps": 20,
        "lengths": {"min_length": 1, "max_length": 150},
    }
    text = page({"phi": {"parity": parity, "layouts": {"layouts": {"native tp=2": parted | {"loss_fall": 0.0}}}}})
    assert "| phi | 2e-07, 3e-06, 1e-07 [1] | 2e-07, 3e-06, 1e-07 [2] | - |" in text
    assert f"1. phi: loss (step 7): apart{said}\n2. phi: the loss falls by 4.1% only, less than 5%\n" in text
    assert f"| phi | 2e-07, 3e-06 [{3 if said else 1}] |" in text


def test_the_page_marks_pushes_as_the_benchmark_does() -> None:
    def row(mean_gap: float, times: float) -> str:
        gaps = {"mean_gap": mean_gap, "max_gap": 2 * mean_gap}
        rounded = {**gaps, "transformers_to_float32": gaps, "mean_gap_over_transformers": times}
        push = {"dtypes": {"float32": gaps, "bfloat16": rounded}, "steps": 2}
        (line,) = (line for line in page({"phi": {"push": push}}).splitlines() if line.startswith("| phi | "))
        assert ("[" in line) is not is_good(push)
        return line

    assert row(1e-6, 3.0) == "| phi | 1e-06, 2e-06 | 1e-06, 2e-06 | 1e-06, 2e-06 | 3.00x |"
    assert row(2e-5, 3.0).startswith("| phi | 2e-05, 4e-05 [1] |")
    assert row(1e-6, 3.1).endswith("| 3.10x [1] |")


def test_the_page_says_of_which_families_speed_was_not_measured() -> None:
    text = page({"phi": {"native_over_transformers": {"equal_lengths": 1.5, "mixed_lengths": 2.0}}})
    assert "| phi | 1.50x | 2.00x |" in text and "| nemotron | - | - |" in text
    assert "## Speed" not in page({"phi": {}})


def test_random_shapes_that_did_not_pass_are_on_the_page() -> None:
    counts = {"native": 2}
    trial: dict[str, Any] = dict.fromkeys(("accepted", "accepted_mixtures", "passed"), counts)
    trial |= {"refusals": {"native": {}}}
    failed = {"family": "qwen3_next", "native": {"outcome": "failed", "error": "loss (step 7): apart"}}
    rounded = {"family": "qwen3_next", "native": {"outcome": "rounding", "error": "loss (step 9): apart"}}
    shapes = {"0": {"family": "qwen3_next", "native": {"outcome": "passed"}}, "5": failed, "6": rounded}
    text = page({"random_shapes": {**trial, "parted_by_rounding": {"native": 1}, "shapes": shapes}})
    assert "- failed: native, seed 5, qwen3_next: loss (step 7): apart" in text
    assert "- parted by rounding: native, seed 6, qwen3_next: loss (step 9): apart" in text
    assert "| native | 2 | 2 | 2 | 1 | 0 | 0 |" in text


def test_shapes_that_part_at_an_edge_say_by_which_margin() -> None:
    first = {"step": 4, "tokens": 1, "largest_margin": 7e-8}
    edge = {"outcome": "edge", "error": "loss (step 4): apart", "to_float64": {}, "first_other_routes": first}
    counts = {"native": 1}
    trial: dict[str, Any] = dict.fromkeys(("accepted", "accepted_mixtures", "passed", "parted_at_an_edge"), counts)
    trial |= {"refusals": {"native": {}}, "shapes": {"5": {"family": "glm4_moe_lite", "native": edge}}}
    text = page({"random_latents": trial})
    assert "- parted at an edge: native, seed 5, glm4_moe_lite: loss (step 4): apart" in text
    assert "in step 4, the first with any: 1, by a margin of at most 7e-08" in text


def test_a_shape_that_failed_stands_beside_the_rounding_of_transformers() -> None:
    apart = {"gradient_rel_diff": 4e-6, "max_loss_rel_diff": 2e-7, "max_grad_norm_rel_diff": 2e-5}
    near = {"gradient_rel_diff": 3e-6, "max_loss_rel_diff": 1e-7, "max_grad_norm_rel_diff": 9e-6}
    failed = {"outcome": "failed", "error": "apart", "to_float64": {"runtime": apart, "transformers": near}}
    counts = {"native": 1}
    trial: dict[str, Any] = dict.fromkeys(("accepted", "accepted_mixtures", "passed"), counts)
    trial |= {"refusals": {"native": {}}}
    text = page({"random_shapes": {**trial, "shapes": {"3": {"family": "qwen3_next", "native": failed}}}})
    assert "apart. It and transformers in float32 are from transformers in float64: 4e-06 and 3e-06 in the gradient" in text
    assert "2e-05 and 9e-06 in the gradient norm" in text


def test_loads_of_experts_are_measured_where_routers_have_biases(tmp_path: Path) -> None:
    for name in (name for name, family in FAMILIES.items() if family.is_mixture):
        hf_config = read_hf_config(write_small(FAMILIES[name], tmp_path / name))
        decoder = find_model("auto", hf_config).parse_config(hf_config)
        takes = any(layer.feed_forward.options >= EXPERT_BIAS_OPTIONS for layer in decoder.layers)
        assert takes is (name in WITH_BIASES), name
    even, uneven = ({"max_over_mean": {"before": 3.0, "after": after}} for after in (1.5, 2.5))
    assert not families.failures("loads", even)
    assert families.failures("loads", uneven)


def test_the_page_has_loads_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_loads, "STEPS", 12)
    found = family_loads.measure_loads(FAMILIES["glm4_moe"], tmp_path)
    balanced, without = found["max_over_mean"], found["max_over_mean_without_balancing"]
    assert balanced["before"] == without["before"] > 1.5, "the first step is not balanced yet"
    assert 1.0 <= balanced["after"] < without["after"]
    text = page({"glm4_moe": {"loads": found}})
    assert f"| glm4_moe | {balanced['before']:.2f} | {balanced['after']:.2f} | {without['after']:.2f} |" in text
