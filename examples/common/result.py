"""What a run comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """Accuracies are mean rewards of greedy responses on ``eval_dataset``; None without one.

    Attributes:
        max_log_prob_gap: largest mean in a step of the difference between trainer and engine, in nats; with stale samples
            also between new weights and old.
        seconds: of the whole run.
        step_seconds: of the training steps alone.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    max_log_prob_gap: float
    seconds: float
    step_seconds: float
