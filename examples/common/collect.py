"""From sampled batches to the batch of a training step: rewards, staleness, dynamic sampling."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors import Sample
from examples.common.clock import Clock
from examples.common.inputs import Inputs
from examples.common.prompts import Prompt
from examples.common.rl_config import RLConfig
from examples.common.run_start import RunStart
from examples.common.sample_stream import SampledBatch, SampleStream
from examples.common.scoring import score
from rl_backend.algorithm import groups_with_signal
from rl_backend.contracts import WeightVersionError


@dataclass(frozen=True)
class TrainingBatch:
    """What a step trains on: ``prompts_per_step`` groups of ``samples_per_prompt``, an entry of each list per sample."""

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Group:
    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]


class Collector:
    """Takes batches from the stream until there is enough to train on.

    Args:
        config: sizes and staleness.
        stream: samples.
        inputs: how they are scored.
        batches_with_signal: with a number, dynamic sampling: groups of equal rewards are replaced by groups of further
            batches, of at most so many; what is missing then is filled up with them.
        start: where the run begins.
    """

    def __init__(
        self,
        config: RLConfig,
        stream: SampleStream,
        inputs: Inputs,
        *,
        batches_with_signal: int | None = None,
        start: RunStart | None = None,
    ) -> None:
        self._config = config
        self._stream = stream
        self._inputs = inputs
        self._batches_with_signal = batches_with_signal
        earlier = start.state("collector") if start else {}
        self._step_of_version: dict[int, int] = dict(earlier.get("step_of_version", []))

    @property
    def state(self) -> dict[str, Any]:
        """What a run that goes on after this step takes over; pushes as far back as samples may be."""
        oldest = max(self._step_of_version.values()) - self._config.batches_ahead
        pushes = [[version, step] for version, step in self._step_of_version.items() if step >= oldest]
        return {"collector": {"step_of_version": pushes}}

    def pushed(self, version: int, step: int) -> None:
        """Engines sample with the weights that ``step`` made from now on; step 0 is the start."""
        self._step_of_version[version] = step

    def collect(self, step: int, clock: Clock) -> TrainingBatch:
        """The batch of ``step``, counted from 1; phases ``sample`` (waiting for samples) and ``reward`` of the clock.

        Metrics: ``reward`` and ``response_tokens``, means over all samples that were scored; ``staleness_mean`` and
        ``staleness_max``, training steps by which the weights of the samples trained on are behind, and
        ``samples_dropped`` for being too old, when sampling ahead; ``batches_sampled`` and ``groups_without_signal``, with
        dynamic sampling.

        Raises:
            WeightVersionError: weights older than sampling ahead explains.
        """
        config = self._config
        chosen: list[_Group] = []
        without_signal: list[_Group] = []
        scored: list[_Group] = []
        dropped = taken = 0
        while len(chosen) < config.prompts_per_step and taken != self._batches_with_signal:
            batch = self._stream.next(more=config.steps - step)
            clock.lap("sample")
            age = self._age(batch, step)
            if age > config.max_staleness and config.stale_samples == "drop":
                dropped += len(batch.samples)
                continue
            taken += 1
            for group in self._score(batch):
                scored.append(group)
                signal = self._batches_with_signal is None or bool(
                    groups_with_signal(group.rewards, group_size=len(group.rewards))[0]
                )
                (chosen if signal else without_signal).append(group)
            clock.lap("reward")
        missing = config.prompts_per_step - len(chosen)
        chosen = chosen[: config.prompts_per_step] + without_signal[: max(missing, 0)]
        if missing > 0:
            # Each of the step's updates gets its part of the groups that teach nothing.
            random.Random(f"{config.seed} {step}").shuffle(chosen)

        metrics = {
            "reward": statistics.fmean(reward for group in scored for reward in group.rewards),
            "response_tokens": statistics.fmean(len(sample.response_ids) for group in scored for sample in group.samples),
        }
        samples = [sample for group in chosen for sample in group.samples]
        if config.batches_ahead:
            ages = [self._age_of(sample, step) for sample in samples]
            metrics |= {"staleness_mean": statistics.fmean(ages), "staleness_max": max(ages), "samples_dropped": dropped}
        if self._batches_with_signal is not None:
            metrics |= {"batches_sampled": taken, "groups_without_signal": len(without_signal)}
        return TrainingBatch(
            [prompt for group in chosen for prompt in group.prompts],
            samples,
            [reward for group in chosen for reward in group.rewards],
            metrics,
        )

    def _age(self, batch: SampledBatch, step: int) -> int:
        """Training steps by which a batch's oldest weights are behind those that ``step`` begins with."""
        age = max(self._age_of(sample, step) for sample in batch.samples)
        if age > self._config.batches_ahead:
            raise WeightVersionError(
                f"step {step}: a sample's weights are {age} steps old; sampling {self._config.batches_ahead} batches ahead "
                "explains fewer: an engine missed a push",
                age=age,
            )
        return age

    def _age_of(self, sample: Sample, step: int) -> int:
        return step - 1 - min(self._step_of_version[span.version] for span in sample.version_spans)

    def _score(self, batch: SampledBatch) -> Iterator[_Group]:
        rewards = score(batch.samples, batch.prompts, self._inputs.tokenizer, self._inputs.reward)
        if self._config.shuffle_rewards:
            random.Random(f"{self._config.seed} {batch.number}").shuffle(rewards)
        size = self._config.samples_per_prompt
        for start in range(0, len(rewards), size):
            rows = slice(start, start + size)
            yield _Group(batch.prompts[rows], batch.samples[rows], rewards[rows])
