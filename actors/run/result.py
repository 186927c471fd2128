"""Results of a run that samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


class Totals:
    """What a run that samples has come to so far, over all of its parts where it was resumed.

    Args:
        earlier: the :attr:`state` of the run that this one continues; empty at the first step.
        began: when the command did, on the clock of ``time.monotonic``.

    Attributes:
        reward: mean reward of the first held-out set when it was last answered; None without one.
        held_out: estimates of all held-out sets, likewise.
    """

    def __init__(self, earlier: Mapping[str, Any], began: float) -> None:
        self._began = began
        self._reward_before: float | None = earlier.get("held_out_reward_before")
        self._held_out_before: Mapping[str, float] = earlier.get("held_out_before", {})
        self.reward: float | None = earlier.get("held_out_reward")
        self.held_out: Mapping[str, float] = earlier.get("held_out_after", {})
        self._max_gap: float = earlier.get("max_log_prob_gap", 0.0)
        self._step_seconds: float = earlier.get("step_seconds", 0.0)
        self._start_seconds: float = earlier.get("start_seconds", 0.0)
        self._earlier_seconds: float = earlier.get("seconds", 0.0)
        self._steps_began = 0.0

    def evaluated_before(self) -> None:
        """What the held-out sets came to last was before training."""
        self._reward_before, self._held_out_before = self.reward, self.held_out

    def begin_steps(self) -> None:
        """The start is over."""
        now = time.monotonic()
        self._start_seconds += now - self._began
        self._steps_began = now - self._step_seconds

    def end_step(self, log_prob_gap: float) -> None:
        """A step has ended, apart from its evaluation."""
        self._max_gap = max(self._max_gap, log_prob_gap)
        self._step_seconds = time.monotonic() - self._steps_began

    @property
    def state(self) -> dict[str, Any]:
        """What a run that continues after this step takes over."""
        return {
            "held_out_reward_before": self._reward_before,
            "held_out_reward": self.reward,
            "held_out_before": self._held_out_before,
            "held_out_after": self.held_out,
            "max_log_prob_gap": self._max_gap,
            "step_seconds": self._step_seconds,
            "start_seconds": self._start_seconds,
            "seconds": self._seconds,
        }

    def result(self) -> RunResult:
        """Of the whole run, now."""
        return RunResult(
            self._reward_before,
            self.reward,
            self._max_gap,
            self._seconds,
            self._start_seconds,
            self._step_seconds,
            self._held_out_before,
            self.held_out,
        )

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + time.monotonic() - self._began
