"""Results of a run that samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunResult:
    """What a run has come to.

    Attributes:
        held_out_reward_before: mean reward of the responses to the first held-out set, which are greedy unless it says
            otherwise; None without one.
        held_out_reward_after: the same after the last step.
        max_log_prob_gap: largest mean in a step of the difference between trainer and engine, in nats; with stale samples
            also between new weights and old.
        seconds: of the whole run, from the beginning of the command; of a run that was resumed, of all its parts.
        start_seconds: of them, until the first step began.
        step_seconds: of them, in training steps.
        held_out_before: estimates of all held-out sets, by their names as metrics.
        held_out_after: the same after the last step.
    """

    held_out_reward_before: float | None
    held_out_reward_after: float | None
    max_log_prob_gap: float
    seconds: float
    start_seconds: float
    step_seconds: float
    held_out_before: Mapping[str, float] = field(default_factory=dict)
    held_out_after: Mapping[str, float] = field(default_factory=dict)
