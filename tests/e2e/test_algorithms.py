"""PPO with a critic, published recipes and sampling ahead, each on the demo's task with real Ray and vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from actors.run import RunResult
from actors.run.session import Session
from examples import grpo, ppo
from examples.demo.__main__ import Algorithm, DemoConfig, demo_settings, reinforce
from tests.support.moe import upcycle

pytestmark = pytest.mark.long

STEPS = 20


def lines(path: Path) -> list[dict[str, Any]]:
    """Of all steps, without what was measured before the first."""
    return [found for line in path.read_text().splitlines() if (found := json.loads(line))["step"]]


def require_learned(result: RunResult) -> None:
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15


@pytest.mark.shows("algorithms: PPO with a critic learns the demo task with all models on one group")
def test_ppo_with_a_critic_learns_the_task(task: Path, warm_model: Path, demo_session: Session, tmp_path: Path) -> None:
    result = reinforce(DemoConfig(algorithm="ppo", steps=30, engines=2), task, warm_model, tmp_path, demo_session)
    require_learned(result)
    assert result.max_log_prob_gap <= 1e-5
    metrics = lines(tmp_path / "ppo" / "metrics.jsonl")
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]
    assert all(line["kl"] > 0 for line in metrics[5:])
    AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "model")
    critic = AutoModelForTokenClassification.from_pretrained(tmp_path / "ppo" / "critic")
    assert critic.score.weight.abs().max() > 0


@pytest.mark.shows("algorithms: PPO with a training group for each model gets the same rewards as with one group for all")
def test_a_group_for_each_model_gives_the_same_run(
    task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    settings = demo_settings(DemoConfig(algorithm="ppo", steps=4, engines=2), task, warm_model, tmp_path)
    options = {"kl_coef": 1e-2, "critic_lr": 1e-3, "critic_warmup_steps": 1, "epochs": 2, "updates_per_step": 2}
    runs = []
    for groups, session in (("one", demo_session), ("each", None)):
        run_dir = tmp_path / groups
        ppo.train(ppo.PPOConfig(**{**settings, **options, "groups": groups, "run_dir": str(run_dir)}), session)
        runs.append(lines(run_dir / "metrics.jsonl"))
    for name in ("reward", "kl", "value_loss", "explained_variance", "critic_grad_norm", "weight_version"):
        # Threads of a group differ in number, and so does the last bit of a sum.
        of_one, of_each = ([line[name] for line in lines_of_run] for lines_of_run in runs)
        torch.testing.assert_close(of_one, of_each, rtol=1e-3, atol=1e-5)
    assert [line["weight_version"] for line in runs[0]] == [0, 4, 8, 12]
    assert "grad_norm" not in runs[0][0]


@pytest.mark.shows("router replay: PPO replays the policy's routes (R2), while its critic and reference route freely")
def test_ppo_replays_the_routes_of_its_old_policy(task: Path, warm_model: Path, tmp_path: Path) -> None:
    mixture = upcycle(warm_model, tmp_path / "mixture")
    config = DemoConfig(model="qwen3_moe", algorithm="ppo", router_replay="R2", steps=3)
    settings = demo_settings(config, task, mixture, tmp_path) | {"lr": 3e-3, "eval_dataset": None}
    ppo.train(ppo.PPOConfig(**settings, critic_lr=1e-3, kl_coef=1e-2, updates_per_step=2))
    metrics = lines(tmp_path / "ppo" / "metrics.jsonl")
    assert all(line["step_ok"] == 1 and line["grad_norm"] > 0 and line["log_prob_gap"] < 0.1 for line in metrics)


@pytest.mark.shows("algorithms: GSPO, DAPO with dynamic sampling, and CISPO learn the demo task")
@pytest.mark.parametrize("algorithm", ["gspo", "dapo", "cispo"])
def test_a_recipe_learns_the_task(
    algorithm: Algorithm, task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    result = reinforce(DemoConfig(algorithm=algorithm, steps=STEPS, engines=2), task, warm_model, tmp_path, demo_session)
    require_learned(result)
    if algorithm == "dapo":
        metrics = lines(tmp_path / "dapo" / "metrics.jsonl")
        assert max(line["batches_sampled"] for line in metrics) > 1
        rewards = [sample["reward"] for sample in lines(tmp_path / "dapo" / "samples.jsonl") if sample["step"] == 1]
        groups = [set(rewards[start : start + 8]) for start in range(0, len(rewards), 8)]
        assert all(len(group) == 2 for group in groups)


@pytest.mark.shows("algorithms: GRPO learns the demo task from samples one step old, with importance weights")
def test_sampling_ahead_learns_the_task_and_records_versions(
    task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    result = reinforce(DemoConfig(steps=STEPS, engines=2, max_staleness=1), task, warm_model, tmp_path, demo_session)
    require_learned(result)
    metrics, samples = lines(tmp_path / "grpo" / "metrics.jsonl"), lines(tmp_path / "grpo" / "samples.jsonl")
    assert [line["staleness_max"] for line in metrics] == [0] + [1] * (STEPS - 1)
    assert all(0.5 < line["importance_weight"] <= 2.0 for line in metrics)
    for line in metrics[1:]:
        versions = {version for row in samples if row["step"] == line["step"] for version, _ in row["version_spans"]}
        assert versions == {line["weight_version"] - 2}


def test_stale_batches_are_dropped_when_sampling_runs_too_far_ahead(task: Path, warm_model: Path, tmp_path: Path) -> None:
    settings = demo_settings(DemoConfig(steps=8), task, warm_model, tmp_path)
    grpo.train(grpo.GRPOConfig(**{**settings, "max_staleness": 1, "sample_ahead": 3}))
    metrics = lines(tmp_path / "grpo" / "metrics.jsonl")
    assert max(line["staleness_max"] for line in metrics) == 1
    assert sum(line["samples_dropped"] for line in metrics) > 0
