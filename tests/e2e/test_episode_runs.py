"""Runs on episodes with Ray and vLLM: adapters, a critic, a reference, and samples ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environment_tasks import write_task
from examples import episodes

pytestmark = pytest.mark.long

OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": "ppo", "critic_lr": 1e-3, "kl_coef": 1e-3, "loss": {"loss_agg_mode": "seq-mean-token-mean"}},
    "lora": {"lora": {"rank": 4}, "max_staleness": 1, "push_during_episodes": True},
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("calculator"), "calculator")


def settings(task: Path, run_dir: Path, **options: Any) -> episodes.EpisodesConfig:
    given = {
        "model": str(task / "model"),
        "dataset": str(task / "train.jsonl"),
        "environment": f"{episodes.__file__}:Calculator",
        "run_dir": str(run_dir),
        "dtype": "float32",
        "steps": 2,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_response_tokens": 12,
        "max_episode_tokens": 64,
        "max_turns": 3,
        "lr": 1e-4,
        "metrics_to": None,
    }
    return episodes.EpisodesConfig(**given | options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.shows("episodes: PPO with a reference, and LoRA with pushes in mid-episode, train on what vLLM samples")
@pytest.mark.parametrize("name", OPTIONS)
def test_episodes_train_with_adapters_and_with_a_critic(task: Path, tmp_path: Path, name: str) -> None:
    result = episodes.train(settings(task, tmp_path / "run", **OPTIONS[name]))
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 2 and all(step["step_ok"] == 1 for step in steps)
    # Samples ahead are of weights one step older.
    assert result.max_log_prob_gap < (1e-5 if name != "lora" else 0.1)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 32
    assert all([trained for _, trained in segment][:2] == [False, True] for each in samples for segment in each["segments"])
    assert "Calculator" in (tmp_path / "run" / "report.html").read_text()
