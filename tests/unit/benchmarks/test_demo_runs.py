"""Runs of the demo that are recorded after they were made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.demo_runs import DEMOS, STEPS, made_demo
from examples.demo.__main__ import DemoConfig
from rl_backend.contracts import ConfigError
from rl_backend.options.command_line import parse_config


def write_run(folder: Path, *options: str) -> Path:
    """What the demo leaves of its options and figures."""
    config = parse_config(DemoConfig, "", ("--run-dir", "elsewhere", *options))
    (folder / "demo.json").write_text(config.model_dump_json())
    figures = {"accuracy_before": 0.4, "accuracy_after": 0.9, "max_log_prob_gap": 1e-7}
    (folder / "summary.json").write_text(json.dumps({**figures, **config.model_dump(mode="json")}))
    return folder


def test_a_run_is_recorded_with_the_figures_that_it_left(tmp_path: Path) -> None:
    found = made_demo("deepseek_v3_R3", write_run(tmp_path, *DEMOS["deepseek_v3_R3"]))
    assert (found["accuracy_before"], found["accuracy_after"], found["steps"]) == (0.4, 0.9, 120)


def test_a_run_with_other_options_is_not(tmp_path: Path) -> None:
    folder = write_run(tmp_path, *DEMOS["deepseek_v3_R3"], "--steps", str(STEPS))
    with pytest.raises(ConfigError, match="other options than --model deepseek_v3"):
        made_demo("deepseek_v3_R3", folder)
