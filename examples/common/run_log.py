"""From the metrics of a step to files, terminal and result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors import RolloutGroup
from examples.common.clock import Clock
from examples.common.collect import TrainingBatch
from examples.common.inputs import Inputs
from examples.common.progress import print_start, print_step
from examples.common.result import RunResult
from examples.common.rl_config import RLConfig
from examples.common.run_folder import RunFolder
from examples.common.run_start import RunStart
from examples.common.scoring import describe, score
from rl_backend.contracts import RLBackendError

type OnStep = Callable[[int, dict[str, float]], None]


class RunLog:
    """Evaluates on the held-out prompts and logs every step.

    Args:
        on_step: sees each step's number and metrics.
        start: where the run begins.
    """

    def __init__(
        self,
        config: RLConfig,
        inputs: Inputs,
        rollout: RolloutGroup,
        folder: RunFolder,
        on_step: OnStep | None,
        start: RunStart,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._rollout = rollout
        self._folder = folder
        self._on_step = on_step
        self._start = start
        earlier = start.state("log")
        self._accuracy_before: float | None = earlier.get("accuracy_before")
        self._accuracy: float | None = earlier.get("accuracy")
        self._max_gap: float = earlier.get("max_log_prob_gap", 0.0)
        self._step_seconds: float = earlier.get("step_seconds", 0.0)
        self._opened = time.perf_counter() - earlier.get("seconds", 0.0)
        self._steps_started = self._opened

    def start(self, title: str, facts: Sequence[str]) -> None:
        """Before the first step, with the first weights pushed."""
        if self._start.checkpoint is None:
            self._accuracy_before = self._accuracy = self._evaluate(0)
        facts = [f"{len(self._inputs.prompts)} prompts", *self._config.facts(), *facts, *self._start.describe()]
        print_start(title, facts, self._accuracy_before, len(self._inputs.held_out))
        self._steps_started = time.perf_counter() - self._step_seconds

    def step(self, step: int, metrics: dict[str, float], batch: TrainingBatch, weight_version: int, clock: Clock) -> None:
        """After a step, with its weights pushed.

        Raises:
            RLBackendError: the log-prob gap is not a number: trainer or engines compute nonsense.
        """
        gap = metrics.get("log_prob_gap", 0.0)
        if not math.isfinite(gap):
            raise RLBackendError(f"step {step}: the log-prob gap between trainer and vLLM is {gap}")
        self._max_gap = max(self._max_gap, gap)
        self._step_seconds = time.perf_counter() - self._steps_started
        config = self._config
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            self._accuracy = self._evaluate(step)
            if self._accuracy is not None:
                metrics["accuracy"] = self._accuracy
                clock.lap("evaluate")
        self._folder.log(step, metrics | clock.seconds | {"weight_version": weight_version})
        logged = slice(config.samples_logged)
        lines = describe(batch.samples[logged], batch.prompts[logged], batch.rewards[logged], self._inputs.tokenizer)
        self._folder.log_samples(step, lines)
        print_step(step, config.steps, metrics, clock.seconds)
        if self._on_step:
            self._on_step(step, metrics)

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on after this step takes over."""
        return {
            "log": {
                "accuracy_before": self._accuracy_before,
                "accuracy": self._accuracy,
                "max_log_prob_gap": self._max_gap,
                "step_seconds": self._step_seconds,
                "seconds": time.perf_counter() - self._opened,
            }
        }

    def finish(self) -> RunResult:
        """After the last step; also writes ``summary.json``."""
        seconds = time.perf_counter() - self._opened
        result = RunResult(self._accuracy_before, self._accuracy, self._max_gap, seconds, self._step_seconds)
        self._folder.write_summary(vars(result))
        return result

    def _evaluate(self, step: int) -> float | None:
        """Mean reward of greedy answers to the held-out prompts; None without any."""
        inputs = self._inputs
        if not inputs.held_out:
            return None
        greedy = inputs.sampling.replace(n=1, temperature=0.0)
        samples = self._rollout.generate([prompt.token_ids for prompt in inputs.held_out], greedy)
        rewards = score(samples, inputs.held_out, inputs.tokenizer, inputs.reward)
        self._folder.log_held_out(step, describe(samples, inputs.held_out, rewards, inputs.tokenizer))
        return statistics.fmean(rewards)
