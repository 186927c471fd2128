"""The demo's own functions, with fewer steps: the whole loop with Ray, vLLM and the native runtime."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from actors.run import RunResult
from actors.run.session import Session
from examples import grpo
from examples.demo.__main__ import DemoConfig, demo_settings, reinforce
from rl_backend.contracts import ConfigError, RegistryError
from tests.e2e.conftest import LEARNED_STEPS
from tests.support.moe import upcycle

STEPS, FEWER = LEARNED_STEPS, 10
"""Of the run that others are compared with, and enough to have learned."""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.shows("loop: GRPO with Ray and vLLM learns the demo task; mean log-prob gap at most 1e-5 in float32")
def test_grpo_learns_the_task_and_trainer_and_engine_agree(learned: tuple[RunResult, Path]) -> None:
    result, _ = learned
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5


def test_a_run_leaves_a_folder_that_a_program_can_read(learned: tuple[RunResult, Path]) -> None:
    result, folder = learned
    metrics, samples = lines(folder / "metrics.jsonl"), lines(folder / "samples.jsonl")
    assert metrics[0] == {"step": 0, "held_out_reward": result.held_out_reward_before, **result.held_out_before}
    assert [line["step"] for line in metrics] == list(range(STEPS + 1))
    assert [line["weight_version"] for line in metrics[1:]] == list(range(1, STEPS + 1))
    assert len(samples) == STEPS * 32 * 8
    assert {version for sample in samples if sample["step"] == 3 for version, _ in sample["version_spans"]} == {2}
    assert all(sample["reward"] == float(sample["response"] == sample["ground_truth"] + "<end>") for sample in samples)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out_reward_after"] == result.held_out_reward_after
    took = sum(value for line in metrics for name, value in line.items() if name.startswith("seconds/"))
    assert summary["start_seconds"] > 0 and summary["seconds"] >= summary["start_seconds"] + 0.9 * took
    assert json.loads((folder / "config.json").read_text())["steps"] == STEPS
    assert list((folder / "tensorboard").glob("events*"))


def test_the_trained_model_is_a_hugging_face_directory(learned: tuple[RunResult, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(learned[1] / "model")
    assert model.config.model_type == "qwen3"


@pytest.mark.shows("loop: GRPO with shuffled rewards does not improve")
@pytest.mark.long
def test_shuffled_rewards_teach_nothing(task: Path, warm_model: Path, demo_session: Session, tmp_path: Path) -> None:
    result = reinforce(DemoConfig(steps=FEWER, engines=2, shuffle_rewards=True), task, warm_model, tmp_path, demo_session)
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert result.held_out_reward_after <= result.held_out_reward_before + 0.05


@pytest.mark.long
@pytest.mark.shows("loop: GRPO on a dense model with 2 training ranks and 2 engines learns the demo task")
def test_two_ranks_and_two_engines_learn_the_task(task: Path, warm_model: Path, tmp_path: Path) -> None:
    result = reinforce(DemoConfig(steps=FEWER, ranks=2, engines=2), task, warm_model, tmp_path)
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5


@pytest.mark.shows("loop: GRPO with 2 training ranks and 2 engines learns the demo task")
@pytest.mark.shows("loop: GRPO on a Qwen3-MoE learns the demo task with R3 and experts over 2 training ranks")
@pytest.mark.long
def test_a_mixture_of_experts_over_two_ranks_learns_the_task_where_vllm_sent_its_tokens(
    task: Path, warm_model: Path, tmp_path: Path
) -> None:
    mixture = upcycle(warm_model, tmp_path / "mixture")
    config = DemoConfig(model="qwen3_moe", steps=FEWER, router_replay="R3", ranks=2, ep=2, engines=2)
    assert_mixture_learns(config, 1, task, mixture, tmp_path)


@pytest.mark.long
@pytest.mark.shows("loop: GRPO on a Qwen3-MoE learns the demo task with R2")
def test_a_mixture_of_experts_learns_the_task_with_the_routes_of_its_old_policy(
    task: Path, warm_model: Path, tmp_path: Path
) -> None:
    mixture = upcycle(warm_model, tmp_path / "mixture")
    assert_mixture_learns(DemoConfig(model="qwen3_moe", steps=FEWER, router_replay="R2"), 2, task, mixture, tmp_path)


def assert_mixture_learns(config: DemoConfig, updates: int, task: Path, mixture: Path, tmp_path: Path) -> None:
    settings = demo_settings(config, task, mixture, tmp_path)
    result = grpo.train(grpo.GRPOConfig(**settings, updates_per_step=updates))
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "grpo" / "model")
    assert trained.config.model_type == "qwen3_moe"
    experts = trained.model.layers[0].mlp.experts.down_proj
    assert bool((experts != experts[:1]).flatten(1).any(1)[1:].all())


def test_bad_options_are_refused_before_anything_starts(task: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model": str(task / "model"),
        "dataset": str(task / "train.jsonl"),
        "reward": "examples.demo.task:compute_score",
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.raises(ConfigError, match="updates_per_step=5: must divide prompts_per_step=32"):
        grpo.GRPOConfig(**settings, updates_per_step=5)
    with pytest.raises(ConfigError, match="unknown field"):
        grpo.GRPOConfig(**settings, learning_rate=1.0)
    with pytest.raises(RegistryError, match="unknown runtime 'nowhere'"):
        grpo.GRPOConfig(**settings, backend="nowhere")
    with pytest.raises(ConfigError, match="no such file"):
        grpo.train(grpo.GRPOConfig(**{**settings, "dataset": "missing.jsonl"}))
    with pytest.raises(ConfigError, match="tokenizer"):
        grpo.train(grpo.GRPOConfig(**{**settings, "model": str(tmp_path)}))
    assert not (tmp_path / "run").exists()
