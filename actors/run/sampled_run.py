"""A run that samples: engines answer, answers are collected, and every step pushes the policy's weights."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from actors.rollout.group.group import RolloutGroup
from actors.rollout.stream import BatchStream, StreamPosition
from actors.run.console import say, say_facts
from actors.run.eval_sets import HeldOutSet
from actors.run.held_out import HeldOutResult, warn_of_unknown
from actors.run.result import RunResult
from actors.run.run import OnStep, Run
from actors.run.sampled_config import SampledConfig
from actors.run.session import Session
from actors.run.stop import StopRequest
from actors.run.versions import VersionedCollector
from actors.run.vital_signs import unknown_tokens
from actors.sync.push import WeightSync
from actors.sync.report import PushReport
from actors.train.model import GroupModel
from rl_backend.contracts import RLBackendError
from rl_backend.lab.text import count, duration


class SampledInputs(Protocol):
    """What any run that samples has read."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def held_out(self) -> Sequence[HeldOutSet]: ...


class CollectedBatch(Protocol):
    """What any step trains on.

    Attributes:
        metrics: of the step, to which others are added.
        failures: what went wrong while it was made, for the user.
    """

    @property
    def metrics(self) -> dict[str, float]: ...

    @property
    def failures(self) -> Sequence[str]: ...


class SampledRun[C: SampledConfig, I: SampledInputs, B: CollectedBatch](Run[C], ABC):
    """A run whose engines sample, and get the policy's weights after every step: what :class:`~actors.run.rl_run.RLRun` and
    :class:`~actors.run.episode_run.EpisodeRun` have in common.

    Args:
        config, session, on_step, label, stop: see :class:`~actors.run.run.Run`.

    Attributes:
        inputs: what the run has read.
    """

    inputs: I
    _batch: B
    _stream: BatchStream[Any, Any]
    _collector: VersionedCollector[B]

    def __init__(
        self,
        config: C,
        session: Session | None = None,
        on_step: OnStep | None = None,
        *,
        label: str = "",
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(config, session, on_step, label=label, stop=stop)
        with self.phase("data", f"reading {self._sources}"):
            self.inputs = self._load_inputs()

    def begin(
        self,
        title: str,
        trained: Mapping[str, GroupModel],
        facts: Sequence[str] = (),
        *,
        batches_with_signal: int | None = None,
    ) -> None:
        """Restores a checkpoint, if any, pushes the weights of the first of ``trained`` and evaluates them.

        Args:
            batches_with_signal: dynamic sampling, see :class:`~actors.run.collect.BatchCollector`.
        """
        config, start = self.config, self.start
        earlier = start.state("log")
        # Checkpoints of the version before call the held-out reward an accuracy.
        self._reward_before: float | None = earlier.get("held_out_reward_before", earlier.get("accuracy_before"))
        self._reward: float | None = earlier.get("held_out_reward", earlier.get("accuracy"))
        self._max_gap: float = earlier.get("max_log_prob_gap", 0.0)
        self._step_seconds: float = earlier.get("step_seconds", 0.0)
        self._earlier_seconds: float = earlier.get("seconds", 0.0)
        self._restore(trained)
        policy = next(iter(trained.values()))
        self._publish = self._publisher(policy)
        self._adapter = policy.handle.name if config.pushes_adapters else None
        self._open_stream(batches_with_signal)
        with self.phase("push", "the first weights to the engines"):
            pushed = self._push(start.step)
        self._before: Mapping[str, float] = earlier.get("held_out_before", {})
        self._after: Mapping[str, float] = earlier.get("held_out_after", {})
        results: list[HeldOutResult] = []
        if start.checkpoint is None and self.inputs.held_out:
            prompts = sum(len(held_out.prompts) for held_out in self.inputs.held_out)
            with self.phase("held-out", f"answering {count(prompts, 'prompt')}"):
                results, metrics = self._evaluate(0)
            self._reward_before, self._before = self._reward, self._after
            self.folder.log_start(metrics)
        facts = [*config.facts(), *facts, f"weights by {pushed.transport}", *start.describe()]
        say_facts(f"{self.label}{title}", [*self._data_facts, *facts])
        self._say_held_out("before", results)
        self._start_seconds: float = earlier.get("start_seconds", 0.0) + time.monotonic() - self._began
        self._steps_started = time.monotonic() - self._step_seconds

    def collect(self) -> B:
        """What the step trains on: the phase ``sample``, and ``reward`` where scores are waited for.

        With the metric ``unknown_tokens`` where the tokenizer has no token for some of the sampled ids.
        """
        self._batch = self._collector.collect(self._step, self._clock)
        if unknown := unknown_tokens(self._sampled_ids(), self.inputs.tokenizer):
            self._batch.metrics["unknown_tokens"] = unknown
        self._say_failures(f"step {self._step}", self._batch.failures)
        return self._batch

    def push(self) -> PushReport:
        """Sends the policy's weights to the engines, between two batches: phases ``wait_for_samples`` and ``sync``."""
        with self._stream.between_batches():
            if self.config.batches_ahead:
                self.lap("wait_for_samples")
            report = self._push(self._step)
        self.lap("sync")
        return report

    def finish(self) -> RunResult:
        """After the last step; also writes ``summary.json``."""
        seconds, start, steps = self._seconds, self._start_seconds, self._step_seconds
        measured = self._reward_before, self._reward, self._max_gap
        result = RunResult(*measured, seconds, start, steps, self._before, self._after)
        self.folder.write_summary(vars(result))
        times = f"{duration(seconds)}: start {duration(start)}, steps {duration(steps)}"
        say(f"{self.label}finished {self.config.steps} steps in {times}")
        return result

    @property
    def _seconds(self) -> float:
        """Of the whole run so far."""
        return self._earlier_seconds + time.monotonic() - self._began

    @property
    def _rollout(self) -> RolloutGroup:
        assert self.session.rollout is not None  # Session.require, and open_session, have seen to it
        return self.session.rollout

    def _publisher(self, policy: GroupModel) -> Callable[[], PushReport]:
        """What brings the policy's present weights to the engines."""
        rollout, transport, enter = self._rollout, self.config.transport, self._stack.enter_context
        if policy.base is not None and self.config.pushes_adapters:
            with self.phase("push", "the frozen model's weights to the engines"):
                enter(self.session.serving(policy.group, policy.base, transport))
            if self._lent is not None:
                self._stack.callback(self._withdraw, policy.handle.name)
            return enter(WeightSync(policy.group, rollout, policy.handle)).push
        merged = policy.base is not None
        return enter(WeightSync(policy.group, rollout, policy.handle, transport=transport, merged=merged)).push

    def _withdraw(self, adapter: str) -> None:
        with suppress(RLBackendError):  # engines that are lost have no adapters any more, nor those that never got it
            self._rollout.remove_adapter(adapter)

    def _push(self, step: int) -> PushReport:
        report = self._publish()
        self._collector.pushed(report.version, step)
        self._version = report.version
        return report

    def _log(self, metrics: dict[str, float]) -> dict[str, float]:
        """Also evaluates, where that is due.

        Raises:
            RLBackendError: the log-prob gap is not a number: trainer or engines compute wrong numbers.
        """
        config, step, clock = self.config, self._step, self._clock
        gap = metrics.get("log_prob_gap", 0.0)
        if not math.isfinite(gap):
            raise RLBackendError(f"step {step}: the log-prob gap between trainer and vLLM is {gap}")
        self._max_gap = max(self._max_gap, gap)
        self._step_seconds = time.monotonic() - self._steps_started
        if step == config.steps or (config.eval_every and step % config.eval_every == 0):
            results, held_out = self._evaluate(step)
            if results:
                metrics |= held_out
                clock.lap("evaluate")
                if len(results) > 1 or results[0].held_out.sampling.n > 1:
                    self._say_held_out(f"after step {step}", results)
        self.folder.log(step, metrics | clock.seconds | {"weight_version": self._version}, self._warnings)
        self._log_samples(step)
        return metrics

    def _state(self) -> dict[str, Any]:
        log = {
            "held_out_reward_before": self._reward_before,
            "held_out_reward": self._reward,
            "held_out_before": self._before,
            "held_out_after": self._after,
            "max_log_prob_gap": self._max_gap,
            "step_seconds": self._step_seconds,
            "start_seconds": self._start_seconds,
            "seconds": self._seconds,
        }
        return {"log": log, "collector": self._collector.state}

    @property
    @abstractmethod
    def _sources(self) -> str:
        """Files, and what else the run reads, in words."""

    @abstractmethod
    def _load_inputs(self) -> I:
        """Reads them."""

    @property
    @abstractmethod
    def _data_facts(self) -> Sequence[str]:
        """Of the data, for the first line."""

    @abstractmethod
    def _failed(self, number: int) -> str:
        """So many of what a batch's ``failures`` are of, in words."""

    @abstractmethod
    def _open_stream(self, batches_with_signal: int | None) -> None:
        """Makes ``_stream`` and ``_collector``."""

    @abstractmethod
    def _answer_held_out(self) -> list[HeldOutResult]:
        """Of all held-out sets."""

    @abstractmethod
    def _sampled_ids(self) -> Iterable[Sequence[int]]:
        """Of the step's batch."""

    @abstractmethod
    def _log_samples(self, step: int) -> None:
        """Lines of the step's samples."""

    def _position(self) -> StreamPosition:
        return self._stream.position

    def _evaluate(self, step: int) -> tuple[list[HeldOutResult], dict[str, float]]:
        """Answers the held-out sets, if any; results, and what they come to as metrics."""
        if not self.inputs.held_out:
            return [], {}
        results = self._answer_held_out()
        for result in results:
            self._say_failures(f"held-out set {result.held_out.name}", result.failures)
            warn_of_unknown(result, self.inputs.tokenizer, self.label)
            self.folder.log_held_out(step, result.lines(self.inputs.tokenizer))
        self._reward = results[0].reward
        self._after = {name: value for result in results for name, value in result.metrics.items()}
        return results, {"held_out_reward": self._reward, **self._after}

    def _say_held_out(self, when: str, results: Sequence[HeldOutResult]) -> None:
        for result in results:
            say(f"{self.label}held-out {result.held_out.name} {when}: {result.describe()}")

    def _say_failures(self, where: str, failures: Sequence[str]) -> None:
        if failures:
            say(f"{self.label}{where}: {self._failed(len(failures))} failed, such as: {failures[0]}")
