"""GRPO with a KL to a reference, and the recipes of other advantages, each on the demo's task with real Ray and vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.run import RunResult
from actors.run.session import Session
from examples import grpo
from examples.demo.__main__ import Algorithm, DemoConfig, demo_settings, reinforce

pytestmark = pytest.mark.long

STEPS = 20


def lines(path: Path) -> list[dict[str, Any]]:
    """Of all steps, without what was measured before the first."""
    return [found for line in path.read_text().splitlines() if (found := json.loads(line))["step"]]


def gain(result: RunResult) -> float:
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.max_log_prob_gap <= 1e-5
    return result.held_out_reward_after - result.held_out_reward_before


@pytest.mark.shows("algorithms: Dr. GRPO, RLOO and REINFORCE++ with a KL in the reward learn the demo task")
@pytest.mark.parametrize("algorithm", ["dr_grpo", "rloo", "reinforce_plus_plus"])
def test_a_recipe_learns_the_task(
    algorithm: Algorithm, task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    config = DemoConfig(algorithm=algorithm, steps=STEPS, engines=2)
    assert gain(reinforce(config, task, warm_model, tmp_path, demo_session)) >= 0.15


@pytest.mark.shows("algorithms: GRPO with a KL to a reference learns the demo task; a large coefficient holds it back")
def test_a_kl_to_a_reference_holds_the_policy_back(
    task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    found = {}
    for kl_coef in (1e-3, 10.0):
        settings = demo_settings(DemoConfig(steps=STEPS, engines=2), task, warm_model, tmp_path)
        run_dir = tmp_path / f"kl-{kl_coef}"
        result = grpo.train(grpo.GRPOConfig(**{**settings, "kl_coef": kl_coef, "run_dir": str(run_dir)}), demo_session)
        found[kl_coef] = gain(result), [line["kl"] for line in lines(run_dir / "metrics.jsonl")]
    (weak_gain, weak), (strong_gain, strong) = found.values()
    # The first update starts at the reference itself, so its KL is zero and pulls nowhere.
    assert weak[0] == pytest.approx(0.0, abs=1e-9) and strong[0] == pytest.approx(0.0, abs=1e-9)
    assert weak_gain >= 0.15
    assert strong_gain < weak_gain / 2
    assert max(strong[-5:]) < min(weak[-5:]) / 5


@pytest.mark.shows(
    "algorithms: GRPO learns from samples cut by top-p and top-k, with importance weights over the same tokens"
)
def test_samples_of_some_tokens_only_are_trained_on_with_the_log_probs_that_they_were_sampled_with(
    task: Path, warm_model: Path, demo_session: Session, tmp_path: Path
) -> None:
    settings = demo_settings(DemoConfig(steps=STEPS, engines=2), task, warm_model, tmp_path)
    cut = {"top_p": 0.9, "top_k": 8, "importance": "truncate", "run_dir": str(tmp_path / "cut")}
    result = grpo.train(grpo.GRPOConfig(**{**settings, **cut}), demo_session)
    found = lines(tmp_path / "cut" / "metrics.jsonl")
    assert max(line["mask_disagreement"] for line in found) <= 1e-3
    assert all(line["importance_weight"] == pytest.approx(1.0, abs=1e-4) for line in found)
    assert result.held_out_reward_before is not None and result.held_out_reward_after is not None
    assert result.held_out_reward_after - result.held_out_reward_before >= 0.1
