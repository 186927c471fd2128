"""The demo as its command runs it, with the layers in a pipeline of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demos import run_demo

pytestmark = pytest.mark.long

LEARNED = 0.9
STEPS = 60
ZBV = ("--vpp", "2", "--train.backend_cfg.pipeline_schedule", "zbv")


@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen3", ZBV), ("qwen3_moe", ZBV), ("qwen3", ("--backend", "bridge"))],
    ids=["zbv", "zbv mixture", "bridge"],
)
def test_the_demo_learns_its_task_in_a_pipeline(model: str, options: tuple[str, ...], tmp_path: Path) -> None:
    pipeline = ("--ranks", "2", "--pp", "2", *options)
    summary = run_demo(tmp_path / "demo", "--model", model, "--steps", str(STEPS), *pipeline)
    assert (summary["train"]["backend_cfg"]["parallel"]["pp"], summary["model"]) == (2, model)
    assert summary["accuracy_after"] >= LEARNED
    assert summary["max_log_prob_gap"] <= 1e-5
