"""The example scripts on the bridge runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import grpo
from examples.demo.__main__ import DemoConfig, demo_settings

STEPS = 10


@pytest.mark.long
@pytest.mark.shows("bridge: GRPO with Ray and vLLM learns the demo task; mean log-prob gap at most 1e-5 in float32")
def test_grpo_on_megatron_learns_the_task(task: Path, warm_model: Path, tmp_path: Path) -> None:
    config = DemoConfig(backend="bridge", steps=STEPS, trace=False)
    settings = demo_settings(config, task, warm_model, tmp_path) | {"lr_decay_style": "constant"}
    result = grpo.train(grpo.GRPOConfig(**settings))
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
