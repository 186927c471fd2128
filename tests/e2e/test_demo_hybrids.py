"""The demo as its command runs it, with models most of whose layers have a recurrent state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demos import run_demo

pytestmark = pytest.mark.long

LEARNED = 0.9
SHORT = ("--warm-start-steps", "300", "--steps", "45")
"""The default is 700 and 120 steps, which take a quarter of an hour."""


@pytest.mark.shows(
    "loop: GRPO on Qwen3.5, dense or a mixture with R3, learns the demo task; log-prob gap at most 1e-5; make test-all "
    "runs neither"
)
@pytest.mark.parametrize(
    ("model", "options"), [("qwen3_5", ()), ("qwen3_5_moe", ("--router-replay", "R3"))], ids=["qwen3_5", "qwen3_5_moe R3"]
)
def test_the_demo_learns_its_task_with_a_recurrent_state(model: str, options: tuple[str, ...], tmp_path: Path) -> None:
    summary = run_demo(tmp_path / "demo", "--model", model, *SHORT, *options)
    assert summary["model"] == model
    assert summary["accuracy_before"] < LEARNED <= summary["accuracy_after"]
    assert summary["max_log_prob_gap"] <= 1e-5
