"""verl's ``main_ppo`` resumed from its checkpoint takes the steps that it would have taken, on both runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.verl_trainers import Algorithm, Backend, resume
from examples.verl.options import write_verl_task
from examples.verl.rl import RLOptions, train
from tests.support import verl_reward
from tests.support.verl_runs import files_of, run_trainer

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.accelerator.is_available(), reason="for verl's CPU platform; this machine has an accelerator"),
]


def sizes(task: Path) -> dict[str, Any]:
    return {
        **files_of(task, "train", "held_out"),
        "reward": verl_reward.__file__,
        "batch_size": 8,
        "samples_per_prompt": 2,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "lr": 1e-3,
    }


@pytest.mark.shows(
    "verl: main_ppo resumed takes the same steps as an uninterrupted run, PPO and GRPO; make test-all runs PPO on the bridge"
)
@pytest.mark.parametrize(("algorithm", "backend"), [("ppo", "native"), ("ppo", "bridge"), ("grpo", "bridge")])
def test_a_resumed_run_takes_the_steps_of_the_one_that_went_on(
    tmp_path: Path, algorithm: Algorithm, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_verl_task(tmp_path / "task")
    settings = sizes(tmp_path / "task")
    found = resume(backend, settings.pop("model"), tmp_path / "runs", algorithm, **settings)
    assert found["first_step_resumed"] == 4
    assert found["largest_relative_difference"] < 1e-4


@pytest.mark.shows(
    "verl: main_ppo trains on the bridge with the policy's routes (R2) and vLLM's (R3); make test-all runs R3"
)
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_grpo_replays_routes_on_the_bridge(tmp_path: Path, mode: Any) -> None:
    write_verl_task(tmp_path / "task", model="qwen3_moe")
    options = RLOptions(
        **sizes(tmp_path / "task"),
        run_dir=str(tmp_path / "run"),
        backend="bridge",
        router_replay=mode,
        steps=2,
        overrides="trainer.val_before_train=False trainer.test_freq=-1",
    )
    found = run_trainer(train, options)
    assert set(found) == {1, 2}
    for metrics in found.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        # All but the last token of a sequence, and padding, have routes of a rollout; all have the policy's own.
        assert metrics["actor/router_replay/replayed_fraction"] > (0.999 if mode == "R2" else 0.8)
