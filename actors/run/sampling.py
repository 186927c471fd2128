"""The sampling half of a run: a batch for each step, a push after it, held-out sets where they are due, and the result."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from actors.collect.collector import CollectedBatch, Collector, Source
from actors.collect.held_out import HeldOutResult, warn_of_unknown
from actors.collect.inputs import EpisodeInputs, Inputs
from actors.collect.sample_metrics import unknown_tokens
from actors.folder.checkpoints import Progress, StreamPosition
from actors.folder.folder import RunFolder
from actors.options.sampled_config import SampledConfig
from actors.sync.report import PushReport
from actors.watch.console import Phases, say
from actors.watch.metrics import Clock
from rl_backend.contracts import RLBackendError
from rl_backend.lab.text import count, duration


@dataclass(frozen=True)
class RunResult:
    """What a run has come to; of a run that was resumed, all its parts together.

    Attributes:
        held_out_reward_before: mean reward of the responses to the first held-out set; None without one.
        max_log_prob_gap: largest mean in a step of the difference between trainer and engine, in nats; with stale samples
            also between new weights and old.
        seconds: of the whole run, from the beginning of the command.
        start_seconds: of them, until the first step began.
        step_seconds: of them, in training steps.
        held_out_before: estimates of all held-out sets, by their names as metrics.
    """

    held_out_reward_before: float | None = None
    held_out_reward_after: float | None = None
    max_log_prob_gap: float = 0.0
    seconds: float = 0.0
    start_seconds: float = 0.0
    step_seconds: float = 0.0
    held_out_before: Mapping[str, float] = field(default_factory=dict)
    held_out_after: Mapping[str, float] = field(default_factory=dict)


class Totals:
    """What a run that samples has come to so far; ``earlier`` is the :attr:`state` of the run that this one continues."""

    def __init__(self, earlier: Mapping[str, Any], began: float) -> None:
        self._began = self._steps_began = began
        # A checkpoint has this field by another name.
        known = {"held_out_reward_after": earlier.get("held_out_reward"), **earlier}
        self._found = RunResult(**{each.name: known[each.name] for each in fields(RunResult) if each.name in known})
        self._earlier_seconds = self._found.seconds

    def evaluated(self, reward: float, estimates: Mapping[str, float], *, first: bool) -> None:
        self._found = replace(self._found, held_out_reward_after=reward, held_out_after=estimates)
        if first:
            self._found = replace(self._found, held_out_reward_before=reward, held_out_before=estimates)

    def begin_steps(self) -> None:
        now = time.monotonic()
        self._steps_began = now - self._found.step_seconds
        self._found = replace(self._found, start_seconds=self._found.start_seconds + now - self._began)

    def end_step(self, log_prob_gap: float) -> None:
        gap = max(self._found.max_log_prob_gap, log_prob_gap)
        self._found = replace(self._found, max_log_prob_gap=gap, step_seconds=time.monotonic() - self._steps_began)

    @property
    def state(self) -> dict[str, Any]:
        facts = dict(vars(self.result()))
        return {"held_out_reward": facts.pop("held_out_reward_after"), **facts}

    def result(self) -> RunResult:
        return replace(self._found, seconds=self._earlier_seconds + time.monotonic() - self._began)


class Sampling[B: CollectedBatch]:
    """Collects what steps train on, keeps engines at the policy's weights, and answers held-out sets with them.

    Args:
        publish: brings the policy's present weights to the engines.
        began: when the command did, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        config: SampledConfig,
        inputs: Inputs | EpisodeInputs,
        source: Source[Any, B],
        publish: Callable[[], PushReport],
        folder: RunFolder,
        progress: Progress,
        *,
        began: float,
        label: str = "",
    ) -> None:
        self._config, self._inputs, self._source, self._publish = config, inputs, source, publish
        self._folder, self._label = folder, label
        self.collector = Collector(config, source, earlier=progress.part("collector"))
        self._totals = Totals(progress.part("log"), began)
        self._batch: B | None = None
        self.version = 0

    def begin(self, step: int, phases: Phases, *, first: bool) -> tuple[PushReport, list[HeldOutResult]]:
        """Pushes the weights that ``step`` has left, and evaluates them where the run is the ``first`` and continues no
        other.
        """
        with phases.phase("push", "the first weights to the engines"):
            pushed = self._push(step)
        results: list[HeldOutResult] = []
        # A run that continues has measured this, and its checkpoint says what.
        if first and self._inputs.held_out:
            prompts = sum(len(held_out.prompts) for held_out in self._inputs.held_out)
            with phases.phase("held-out", f"answering {count(prompts, 'prompt')}"):
                results, metrics = self._evaluate(0)
            self._folder.log_start(metrics)
        return pushed, results

    def begin_steps(self, results: Sequence[HeldOutResult]) -> None:
        self._say_held_out("before", results)
        self._totals.begin_steps()

    def collect(self, step: int, clock: Clock) -> B:
        self._batch = batch = self.collector.collect(step, clock)
        if unknown := unknown_tokens(self._source.sampled_ids(batch), self._inputs.tokenizer):
            batch.metrics["unknown_tokens"] = unknown
        self._say_failures(f"step {step}", batch.failures)
        return batch

    def push(self, step: int, lap: Callable[[str], None]) -> PushReport:
        # A push during a batch would give its samples weights of two versions.
        with self._source.stream.between_batches():
            if self._config.batches_ahead:
                lap("wait_for_samples")
            report = self._push(step)
        lap("sync")
        return report

    def end_step(self, step: int, log_prob_gap: float, clock: Clock) -> dict[str, float]:
        """Evaluates, where that is due; the phase ``evaluate``, and metrics. Refuses a log-prob gap that is not a number."""
        if not math.isfinite(log_prob_gap):
            raise RLBackendError(f"step {step}: the log-prob gap between trainer and vLLM is {log_prob_gap}")
        self._totals.end_step(log_prob_gap)
        if not self.evaluates(step):
            return {}
        results, metrics = self._evaluate(step)
        clock.lap("evaluate")
        if len(results) > 1 or results[0].held_out.sampling.n > 1:
            self._say_held_out(f"after step {step}", results)
        return metrics

    def evaluates(self, step: int) -> bool:
        """Whether held-out sets are answered when this step ends."""
        every = self._config.eval_every
        return bool(self._inputs.held_out) and (step == self._config.steps or (every > 0 and step % every == 0))

    def log_samples(self, step: int) -> None:
        assert self._batch is not None, "a step collects before it ends"
        self._folder.log_samples(step, self._source.describe(self._batch))

    def finish(self) -> RunResult:
        """After the last step; also writes ``summary.json``."""
        result = self._totals.result()
        self._folder.write_summary(vars(result))
        times = f"start {duration(result.start_seconds)}, steps {duration(result.step_seconds)}"
        say(f"{self._label}finished {self._config.steps} steps in {duration(result.seconds)}: {times}")
        return result

    @property
    def state(self) -> dict[str, Any]:
        return {"log": self._totals.state, "collector": self.collector.versions.state}

    @property
    def position(self) -> StreamPosition:
        return self._source.stream.position

    def _push(self, step: int) -> PushReport:
        report = self._publish()
        self.collector.versions.pushed(report.version, step)
        self.version = report.version
        return report

    def _evaluate(self, step: int) -> tuple[list[HeldOutResult], dict[str, float]]:
        results = self._source.answer_held_out()
        for result in results:
            self._say_failures(f"held-out set {result.held_out.name}", result.failures)
            warn_of_unknown(result, self._inputs.tokenizer, self._label)
            self._folder.log_held_out(step, result.lines(self._inputs.tokenizer))
        reward = results[0].reward
        estimates = {name: value for result in results for name, value in result.metrics.items()}
        self._totals.evaluated(reward, estimates, first=step == 0)
        return results, {"held_out_reward": reward, **estimates}

    def _say_held_out(self, when: str, results: Sequence[HeldOutResult]) -> None:
        for result in results:
            say(f"{self._label}held-out {result.held_out.name} {when}: {result.describe()}")

    def _say_failures(self, where: str, failures: Sequence[str]) -> None:
        if failures:
            say(f"{self._label}{where}: {self._source.failed(len(failures))} failed, such as: {failures[0]}")
