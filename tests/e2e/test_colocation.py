"""Ranks and engines that have memory in turn train as those that have their own; real Ray and vLLM, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.folder.resume import checkpoints_of
from examples import grpo
from examples.demo.__main__ import DemoConfig, demo_settings
from tests.support.runs import differences, outcome

STEPS = 3
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str))
"""


@pytest.mark.long
@pytest.mark.shows("loop: with colocate, GRPO has the rewards, samples and weights of a run whose engines never sleep")
def test_a_colocated_run_is_the_run_whose_engines_never_sleep(task: Path, ray_cluster: None, tmp_path: Path) -> None:
    # A random model has no right answers, but texts of more or fewer characters.
    (tmp_path / "reward.py").write_text(REWARD)
    settings = demo_settings(DemoConfig(steps=STEPS, trace=False), task, task / "model", tmp_path)
    settings |= {"reward": f"{tmp_path}/reward.py:compute_score", "prompts_per_step": 4, "lr_warmup_steps": 0}
    settings |= {"eval_dataset": None, "save_every": 2}
    runs = {}
    for colocate in (False, True):
        run = tmp_path / f"colocate-{colocate}"
        config = grpo.GRPOConfig(**{**settings, "run_dir": str(run), "colocate": colocate})
        result = grpo.train(config)
        assert result.max_log_prob_gap <= 1e-5 and checkpoints_of(config).steps() == [2, 3]
        runs[colocate] = outcome(run)
    assert differences(runs[True], runs[False]) == []
    metrics = [json.loads(line) for line in (tmp_path / "colocate-True" / "metrics.jsonl").read_text().splitlines()]
    assert [line["weight_version"] for line in metrics] == [1, 2, 3] and all(line["grad_norm"] > 0 for line in metrics)
    assert all(line["seconds/hand_over"] > 0 for line in metrics)
