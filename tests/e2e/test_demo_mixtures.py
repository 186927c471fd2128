"""The demo as its command runs it, with mixtures whose routers score each expert by itself, and with gpt-oss."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demos import run_demo

pytestmark = pytest.mark.long

LEARNED = 0.9
STEPS = {"glm4_moe": 80, "minimax_m2": 80, "deepseek_v3": 120}


@pytest.mark.shows(
    "loop: GRPO on GLM-4.5, MiniMax-M2 and DeepSeek-V3 with R3 learns the demo task; gap at most 1e-5; make test-all runs "
    "GLM-4.5"
)
@pytest.mark.parametrize("model", STEPS)
def test_the_demo_learns_its_task_with_sigmoid_routers(model: str, tmp_path: Path) -> None:
    summary = run_demo(tmp_path / "demo", "--model", model, "--steps", str(STEPS[model]), "--router-replay", "R3")
    assert summary["model"] == model
    assert summary["accuracy_before"] < LEARNED <= summary["accuracy_after"]
    assert summary["max_log_prob_gap"] <= 1e-5 and summary["gap_is_rounding"]


@pytest.mark.shows("loop: GRPO on gpt-oss in bfloat16 with R3 learns the demo task; the gap is that of rounding")
def test_the_demo_learns_its_task_in_bfloat16_with_attention_sinks(tmp_path: Path) -> None:
    summary = run_demo(tmp_path / "demo", "--model", "gpt_oss", "--router-replay", "R3", "--steps", "150")
    assert (summary["model"], summary["computed_in"]) == ("gpt_oss", "bfloat16")
    assert summary["accuracy_before"] < LEARNED <= summary["accuracy_after"]
    # More than float32 rounds: the engine did compute in bfloat16.
    assert summary["max_log_prob_gap"] > 1e-5
    assert summary["gap_is_rounding"]
