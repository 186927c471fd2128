"""The demo as its command runs it, with the layers in a pipeline of two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters import ROOT

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
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = (sys.executable, "-m", "examples.demo", "--run-dir", str(tmp_path / "demo"), "--model", model)
    run = subprocess.run(
        [*command, "--steps", str(STEPS), "--ranks", "2", "--pp", "2", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert (summary["train"]["backend_cfg"]["parallel"]["pp"], summary["model"]) == (2, model)
    assert summary["accuracy_after"] >= LEARNED
    assert summary["max_log_prob_gap"] <= 1e-5
