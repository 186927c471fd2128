"""Runs whose samples share their prompts, or the past of their episodes, learn as those of whole sequences do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from actors.run import RunResult
from benchmarks.environment_tasks import write_task
from benchmarks.environments import imitate
from examples import episodes, grpo, ppo
from examples.demo.__main__ import DemoConfig, demo_settings
from rl_backend.data import prefixes

pytestmark = pytest.mark.long

STEPS = 10
PLUGIN = "tests.support.short_runs"
"""Named alone: its import changes what all tests share."""


class Curve(NamedTuple):
    """Attributes:
    rewards: of each step, in training.
    computed: of the tokens of each step's updates, those that were computed; 1 without sharing.
    """

    before: float
    after: float
    rewards: list[float]
    computed: list[float]
    largest_gap: float


def curve_of(result: RunResult, run_dir: Path) -> Curve:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "grad_norm" in line]
    assert result.held_out_reward_before is not None and result.held_out_reward_after is not None
    return Curve(
        result.held_out_reward_before,
        result.held_out_reward_after,
        [line["reward"] for line in lines],
        [line.get("tokens_computed", 1) / line.get("tokens_trained", 1) for line in lines],
        result.max_log_prob_gap,
    )


@pytest.fixture(scope="module")
def learn(
    task: Path, warm_model: Path, calculator: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Curve]:
    """A run of the algorithm with ``share_prefixes``."""

    def run(algorithm: str, share: str) -> Curve:
        run_dir = tmp_path_factory.mktemp(f"{algorithm}_{share}")
        shared: dict[str, Any] = {
            "run_dir": str(run_dir),
            "steps": STEPS,
            "train": {"plugins": [PLUGIN], "backend_cfg": {"share_prefixes": share}},
        }
        of_demo = demo_settings(DemoConfig(), task, warm_model, run_dir) | {"lr_warmup_steps": 2, **shared}
        if algorithm == "grpo":
            return curve_of(grpo.train(grpo.GRPOConfig(**of_demo)), run_dir)
        if algorithm == "ppo":
            critic = {"critic_lr": 1e-3, "kl_coef": 1e-3, "prompts_per_step": 64, "samples_per_prompt": 4}
            return curve_of(ppo.train(ppo.PPOConfig(**of_demo, **critic)), run_dir)
        held_out = {"path": str(calculator / "held_out.jsonl"), "n": 2, "temperature": 1.0}
        of_episodes = {
            "model": str(calculator / "warm"),
            "dataset": str(calculator / "train.jsonl"),
            "eval_dataset": {"calculator": held_out},
            "environment": f"{episodes.__file__}:Calculator",
            "dtype": "float32",
            "prompts_per_step": 16,
            "samples_per_prompt": 16,
            "max_response_tokens": 16,
            "max_episode_tokens": 96,
            "max_turns": 4,
            "lr": 3e-4,
            "lr_warmup_steps": 2,
        }
        return curve_of(episodes.train(episodes.EpisodesConfig(**of_episodes, **shared)), run_dir)

    return run


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calculator's task, and a model in it that imitates careless demonstrations."""
    folder = write_task(tmp_path_factory.mktemp("calculator"), "calculator")
    imitate(folder / "model", folder / "demonstrations.jsonl", folder / "warm", 1500)
    return folder


MOST_COMPUTED: Mapping[str, float] = {"grpo": 0.25, "ppo": 0.4, "calculator": 0.4}


@pytest.mark.shows(
    "loop: GRPO and PPO learn the demo task, and GRPO the episodes of the calculator, with shared prefixes as without: 10 "
    "steps of the same seed"
)
@pytest.mark.parametrize("algorithm", MOST_COMPUTED)
def test_runs_with_shared_prefixes_learn_as_those_of_whole_sequences(
    learn: Callable[[str, str], Curve], monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    # The driver plans with what ranks share, imports the plugin once, and has the constant again for the next test.
    monkeypatch.setattr(prefixes, "SHORTEST_RUN", 2)
    shared, alone = learn(algorithm, "auto"), learn(algorithm, "off")
    for found in (shared, alone):
        assert len(found.rewards) == STEPS and found.largest_gap <= 1e-5
        assert found.after >= found.before + 0.15
    assert set(alone.computed) == {1.0} and max(shared.computed) < MOST_COMPUTED[algorithm]
    # Of one model, and of the same samples for so long as rounding turns no token.
    assert shared.before == alone.before and shared.rewards[:2] == alone.rewards[:2]
    assert shared.after == pytest.approx(alone.after, abs=0.1)
