"""Options of a run whose samples are scored by reward functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from actors.run.sampled_config import SampledConfig
from rl_backend.data.rewards import RewardConfig, WeightedReward

REWARD_OPTIONS: Mapping[str, str] = {
    "reward": "rewards.functions",
    **{f"reward_{name}": f"rewards.{name}" for name in ("timeout_seconds", "workers", "processes", "concurrency")},
    "on_reward_failure": "rewards.on_failure",
}
"""Short name -> place, of reward functions."""


class RLConfig(SampledConfig):
    """Those of every run that samples, and reward functions."""

    short: ClassVar[Mapping[str, str]] = {**SampledConfig.short, **REWARD_OPTIONS}
    preset: ClassVar[Mapping[str, Any]] = {**SampledConfig.preset, "rewards.on_failure": "stop"}
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {"reward": ("reward", "shuffle_rewards")}
    metavars: ClassVar[Mapping[str, str]] = {**SampledConfig.metavars, "reward": "FILE.py:FUNCTION"}
    example: ClassVar[str] = (
        "--model models/Qwen3-0.6B --dataset train.jsonl --reward my_reward.py:compute_score --steps 200 --run-dir runs/mine"
    )

    rewards: RewardConfig = Field(description="reward functions, see docs/rewards.md")

    @property
    def reward(self) -> str | dict[str, WeightedReward]:
        """The reward functions: ``rewards.functions``."""
        return self.rewards.functions
