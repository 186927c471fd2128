"""GRPO by verl's own trainer, ``verl.trainer.main_ppo``, on our engine, with a KL to the initial policy and vLLM.

    python -m examples.verl.grpo                                  # the demo's model and task
    python -m examples.verl.grpo --model Qwen/Qwen3-4B --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet \\
        --ranks 8 --batch-size 256 --tp 2 --rollout-tp 2

The command that it runs is printed, to be copied.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from actors.run.command_line import run_command
from examples.verl import rl


class GRPOOptions(rl.RLOptions):
    """Options of a run."""

    run_dir: str = Field(default="runs/verl_grpo", description="folder for metrics.jsonl and checkpoints")
    kl_coef: float = Field(default=1e-3, ge=0, description="weight of the KL to the initial policy in the loss")


def train(options: GRPOOptions) -> Path:
    """Runs GRPO; returns verl's log of metrics."""
    task, options = rl.demo_options(options)
    return options.run(["-m", "verl.trainer.main_ppo"], overrides(options, task))


def overrides(options: GRPOOptions, task: Path | None) -> list[str]:
    """verl's configuration, as overrides of its ``ppo_trainer.yaml``."""
    return [
        *rl.overrides(options, task),
        "algorithm.adv_estimator=grpo",
        *options.engine("actor_rollout_ref.ref.megatron"),
        f"actor_rollout_ref.actor.use_kl_loss={options.kl_coef > 0}",
        f"actor_rollout_ref.actor.kl_loss_coef={options.kl_coef}",
    ]


def main(options: GRPOOptions) -> None:
    print(f"metrics: {train(options)}")


if __name__ == "__main__":
    run_command(main, GRPOOptions, "GRPO by verl's trainer.")
