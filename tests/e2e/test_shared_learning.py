"""A run whose samples share their prompts learns as one of whole sequences does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.__main__ import DemoConfig, reinforce
from rl_backend.data import prefixes

pytestmark = pytest.mark.long

PLUGIN = "tests.support.short_runs"
"""Named alone: its import changes what all tests share."""


@pytest.mark.shows("loop: GRPO learns the demo task with the prompts of groups computed once")
def test_grpo_learns_with_shared_prompts(
    task: Path, warm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The driver plans with what ranks share, imports the plugin once, and has the constant again for the next test.
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 2)
    result = reinforce(DemoConfig(steps=10, plugins=(PLUGIN,)), task, warm_model, tmp_path)
    assert result.held_out_reward_before is not None and result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
    lines = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    computed = [line["tokens_computed"] / line["tokens_trained"] for line in lines if "grad_norm" in line]
    # 8 answers of about 4 tokens to a prompt of 6, and 32 prompts of which many begin alike.
    assert len(computed) == 10 and max(computed) < 0.4
