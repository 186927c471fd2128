"""PPO with a critic by verl's own trainer, ``verl.trainer.main_ppo``, on our engine, with vLLM.

    python -m examples.verl.ppo                                   # the demo's model and task
    python -m examples.verl.ppo --model Qwen/Qwen3-4B --train-files gsm8k/train.parquet --val-files gsm8k/test.parquet \\
        --ranks 8 --batch-size 256 --samples-per-prompt 1 --tp 2 --rollout-tp 2

The command that it runs is printed, to be copied.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from actors.run.command_line import run_command
from examples.verl import rl


class PPOOptions(rl.RLOptions):
    """Options of a run."""

    run_dir: str = Field(default="runs/verl_ppo", description="folder for metrics.jsonl and checkpoints")
    critic_lr: float = Field(default=1e-5, gt=0, description="learning rate of the critic")
    critic_warmup: int = Field(default=0, ge=0, description="first steps, in which the critic alone is trained")


def train(options: PPOOptions) -> Path:
    """Runs PPO; returns verl's log of metrics."""
    task, options = rl.demo_options(options, critic_lr=1e-3)
    return options.run(["-m", "verl.trainer.main_ppo"], overrides(options, task))


def overrides(options: PPOOptions, task: Path | None) -> list[str]:
    """verl's configuration, as overrides of its ``ppo_trainer.yaml``."""
    return [
        *rl.overrides(options, task),
        "algorithm.adv_estimator=gae",
        *options.engine("critic.megatron"),
        f"critic.model.path={options.model}",
        f"critic.optim.lr={options.critic_lr}",
        f"critic.ppo_max_token_len_per_gpu={options.max_tokens_per_rank}",
        f"trainer.critic_warmup={options.critic_warmup}",
    ]


def main(options: PPOOptions) -> None:
    print(f"metrics: {train(options)}")


if __name__ == "__main__":
    run_command(main, PPOOptions, "PPO by verl's trainer.")
