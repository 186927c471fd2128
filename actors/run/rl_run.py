"""A run that samples: engines answer prompts, answers are scored, and every step pushes the policy's weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from actors.rollout.group import RolloutGroup
from actors.rollout.stream import BatchStream, SampleStream, StreamPosition
from actors.run.collect import BatchCollector, TrainingBatch, load_inputs
from actors.run.console import say, say_facts
from actors.run.eval_sets import HeldOutSet
from actors.run.held_out import HeldOutResult, answer
from actors.run.result import RunResult as RunResult
from actors.run.rl_config import RLConfig
from actors.run.run import OnStep, Run
from actors.run.sampled_config import SampledConfig
from actors.run.saver import stream_position
from actors.run.scoring import describe
from actors.run.session import Session
from actors.run.stop import StopRequest
from actors.run.versions import VersionedCollector
from actors.sync.push import WeightSync
from actors.sync.report import PushReport
from actors.train.model import GroupModel
from rl_backend.contracts import RLBackendError
from rl_backend.lab.text import count, duration


class SampledRun[C: SampledConfig](Run[C]):
    """A run whose engines sample, and get the policy's weights after every step: what :class:`RLRun` and
    :class:`~actors.run.episode_run.EpisodeRun` have in common.
    """

    _stream: BatchStream[Any, Any]
    _collector: VersionedCollector

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
        if start.checkpoint is None and self._held_out_sets:
            prompts = sum(len(held_out.prompts) for held_out in self._held_out_sets)
            with self.phase("held-out", f"answering {count(prompts, 'prompt')}"):
                results, metrics = self._evaluate(0)
            self._reward_before, self._before = self._reward, self._after
            self.folder.log_start(metrics)
        facts = [*config.facts(), *facts, f"weights by {pushed.transport}", *start.describe()]
        say_facts(f"{self.label}{title}", [*self._data_facts, *facts])
        self._say_held_out("before", results)
        self._start_seconds: float = earlier.get("start_seconds", 0.0) + time.monotonic() - self._began
        self._steps_started = time.monotonic() - self._step_seconds

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
    def _tokenizer(self) -> Any:
        raise NotImplementedError

    @property
    def _data_facts(self) -> Sequence[str]:
        """Of the data, for the first line."""
        raise NotImplementedError

    @property
    def _held_out_sets(self) -> Sequence[HeldOutSet]:
        raise NotImplementedError

    def _open_stream(self, batches_with_signal: int | None) -> None:
        """Makes ``_stream`` and ``_collector``."""
        raise NotImplementedError

    def _answer_held_out(self) -> list[HeldOutResult]:
        raise NotImplementedError

    def _log_samples(self, step: int) -> None:
        """Lines of the step's samples."""
        raise NotImplementedError

    def _position(self) -> StreamPosition:
        return self._stream.position

    def _evaluate(self, step: int) -> tuple[list[HeldOutResult], dict[str, float]]:
        """Answers the held-out sets, if any; results, and what they come to as metrics."""
        if not self._held_out_sets:
            return [], {}
        results = self._answer_held_out()
        for result in results:
            self._say_failures(f"held-out set {result.held_out.name}", result.failures)
            self.folder.log_held_out(step, result.lines(self._tokenizer))
        self._reward = results[0].reward
        self._after = {name: value for result in results for name, value in result.metrics.items()}
        return results, {"held_out_reward": self._reward, **self._after}

    def _say_held_out(self, when: str, results: Sequence[HeldOutResult]) -> None:
        for result in results:
            say(f"{self.label}held-out {result.held_out.name} {when}: {result.describe()}")

    def _say_failures(self, where: str, failures: Sequence[str]) -> None:
        if failures:
            say(f"{self.label}{where}: {count(len(failures), 'call')} of reward functions failed, such as: {failures[0]}")


class RLRun(SampledRun[RLConfig]):
    """A run that samples: batches of prompts are answered by engines, scored, and trained on::

        with RLRun(config) as run:
            policy = run.build_model("policy")
            run.begin("Mine", {"policy": policy})
            for step in run.steps():
                batch = run.collect()
                ...  # updates of the policy
                run.lap("train")
                run.push()
                run.end_step(batch.metrics | update_metrics(updates))
            run.save_model(policy)
            result = run.finish()

    Attributes:
        inputs: tokenizer, reward functions and prompts.
    """

    _collector: BatchCollector

    def __init__(
        self,
        config: RLConfig,
        session: Session | None = None,
        on_step: OnStep | None = None,
        *,
        label: str = "",
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__(config, session, on_step, label=label, stop=stop)
        with self.phase("data", f"reading {config.dataset}"):
            self.inputs = load_inputs(self.config)

    def collect(self) -> TrainingBatch:
        """The step's samples with their rewards: phases ``sample`` and ``reward``."""
        self._batch = self._collector.collect(self._step, self._clock)
        self._say_failures(f"step {self._step}", self._batch.failures)
        return self._batch

    @property
    def _tokenizer(self) -> Any:
        return self.inputs.tokenizer

    @property
    def _data_facts(self) -> Sequence[str]:
        return [f"{len(self.inputs.prompts)} prompts", *self.inputs.notes]

    @property
    def _held_out_sets(self) -> Sequence[HeldOutSet]:
        return self.inputs.held_out

    def _open_stream(self, batches_with_signal: int | None) -> None:
        config, inputs, start = self.config, self.inputs, self.start
        self._stack.callback(inputs.reward.close)
        collector: BatchCollector
        stream = self._stack.enter_context(
            SampleStream(
                self._rollout,
                inputs.batches,
                inputs.sampling,
                seed=config.seed,
                ahead=config.batches_ahead,
                adapter=self._adapter,
                start=stream_position(start),
                on_sampled=lambda batch: collector.sampled(batch),
            )
        )
        earlier = start.state("collector")
        collector = BatchCollector(config, stream, inputs, batches_with_signal=batches_with_signal, earlier=earlier)
        self._stream, self._collector = stream, collector

    def _answer_held_out(self) -> list[HeldOutResult]:
        inputs, config = self.inputs, self.config
        return answer(
            self._rollout, inputs.held_out, inputs.tokenizer, inputs.reward, seed=config.seed, adapter=self._adapter
        )

    def _log_samples(self, step: int) -> None:
        batch, logged = self._batch, slice(self.config.samples_logged)
        lines = describe(batch.samples[logged], batch.prompts[logged], batch.scores[logged], self._tokenizer)
        self.folder.log_samples(step, lines)
