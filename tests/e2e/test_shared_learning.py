"""Runs whose samples share their prompts learn as those of whole sequences do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.run import parse_config
from benchmarks import environments
from benchmarks.environment_tasks import write_task
from examples import episodes
from examples.demo.__main__ import Algorithm, DemoConfig, reinforce
from rl_backend.data import prefixes
from tests.support import short_runs

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def _of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver plans with what ranks, which have the plugin, share; another test has the constant again.
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", short_runs.SHORTEST_RUN)


def require_shared(run_dir: Path, at_most: float) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    computed = [line["tokens_computed"] / line["tokens_trained"] for line in lines if "grad_norm" in line]
    assert computed and max(computed) < at_most


@pytest.mark.shows("loop: GRPO and PPO learn the demo task with the prompts of groups computed once")
@pytest.mark.parametrize(("algorithm", "steps"), [("grpo", 10), ("ppo", 30)])
def test_the_demo_learns_with_shared_prompts(
    task: Path, warm_model: Path, tmp_path: Path, algorithm: Algorithm, steps: int
) -> None:
    config = DemoConfig(algorithm=algorithm, steps=steps, plugins=(short_runs.__name__,))
    result = reinforce(config, task, warm_model, tmp_path)
    assert result.held_out_reward_before is not None and result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
    # 8 answers of about 4 tokens to a prompt of 6.
    require_shared(tmp_path / algorithm, 0.7)


@pytest.mark.shows("episodes: GRPO learns to use a calculator with what episodes of a group have in common computed once")
def test_episodes_with_a_calculator_learn_with_a_shared_past(tmp_path: Path, ray_cluster: None) -> None:
    folder = write_task(tmp_path / "calculator", "calculator")
    environments.imitate(folder / "model", folder / "demonstrations.jsonl", folder / "warm", 1500)
    given = environments.options(
        "calculator", tmp_path, "run", ("--steps", "16", "--lr", "3e-4", "--plugins", short_runs.__name__)
    )
    result = episodes.train(parse_config(episodes.EpisodesConfig, "", given))
    assert result.held_out_reward_before is not None and result.held_out_reward_after is not None
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
    require_shared(tmp_path / "runs" / "run", 0.9)
