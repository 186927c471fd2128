"""From prompts and samples to the batch of a training step: inputs, rewards, staleness, dynamic sampling."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.rollout.config import SamplingConfig
from actors.rollout.sample import Sample
from actors.rollout.stream import SampledBatch, SampleStream
from actors.run.clock import Clock
from actors.run.ends import Ends
from actors.run.eval_sets import HeldOutSet, load_held_out
from actors.run.reward_scores import begin_scoring, load_scorer
from actors.run.sampled_config import RLConfig
from actors.run.versions import VersionedCollector
from actors.run.vital_signs import sample_metrics
from actors.train.model import require_experts, require_known_end
from rl_backend.algorithm import groups_with_signal
from rl_backend.contracts import ConfigError, RewardError
from rl_backend.data.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from rl_backend.data.rewards import RewardScorer, Score, Scoring, reward_metrics


@dataclass(frozen=True)
class Inputs:
    """Tokenizer, reward functions, prompts, and how to sample.

    Attributes:
        notes: what was done with prompts that are too long, for the run's first line.
    """

    tokenizer: Any
    reward: RewardScorer
    prompts: Sequence[Prompt]
    held_out: Sequence[HeldOutSet]
    batches: Iterator[list[Prompt]]
    sampling: SamplingConfig
    notes: tuple[str, ...] = ()


def load_inputs(config: RLConfig) -> Inputs:
    """Reads everything that ``config`` names.

    Raises:
        ConfigError, BatchError: a file or folder that is missing or cannot be used.
    """
    require_experts(f"{type(config).__name__}.router_replay", config.router_replay, config.model)
    tokenizer = load_tokenizer(config.model)
    require_known_end(f"{type(config).__name__}.model", config.model, tokenizer)
    reward = load_scorer(config.rewards)
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.max_prompt_tokens,
        data=config.data,
        require_answer=reward.needs_ground_truth,
    )
    new_ends = partial(Ends, config.model, tokenizer, config.data)
    ends = new_ends()
    prompts = load(config.dataset, see=ends.see)
    held_out = load_held_out(config.eval_sets, config.eval_sampling, load, new_ends)
    if len(prompts) < config.prompts_per_step:
        raise ConfigError.of(
            f"{type(config).__name__}.prompts_per_step",
            config.prompts_per_step,
            f"{config.dataset} has {len(prompts)} prompts; use at most that",
        )
    return Inputs(
        tokenizer=tokenizer,
        reward=reward,
        prompts=prompts,
        held_out=held_out,
        batches=endless_batches(prompts, config.prompts_per_step, config.seed),
        sampling=ends.added_to(config.sampling),
        notes=tuple(note for note in (prompts.note, *(each.note for each in held_out)) if note),
    )


@dataclass(frozen=True)
class TrainingBatch:
    """What a step trains on: groups of ``samples_per_prompt``, an entry of each list per sample.

    There are ``prompts_per_step`` groups, or fewer where reward functions failed and ``on_reward_failure`` is drop.

    Attributes:
        scores: what the rewards are made of.
        failures: messages of the reward functions' calls that failed, also in groups that were dropped.
    """

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]
    metrics: dict[str, float]
    scores: list[Score] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Group:
    prompts: list[Prompt]
    samples: list[Sample]
    scores: list[Score]

    @property
    def rewards(self) -> list[float]:
        return [score.value for score in self.scores]


class BatchCollector(VersionedCollector[TrainingBatch]):
    """Takes batches from the stream until there is enough to train on.

    Args:
        config: sizes and staleness.
        stream: samples.
        inputs: how they are scored.
        batches_with_signal: with a number, dynamic sampling: groups of equal rewards are replaced by groups of further
            batches, of at most so many; what is missing then is filled up with them.
        earlier: the :attr:`state` of the run that this one continues; empty at the first step.
    """

    def __init__(
        self,
        config: RLConfig,
        stream: SampleStream,
        inputs: Inputs,
        *,
        batches_with_signal: int | None = None,
        earlier: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(config, earlier)
        self._config = config
        self._stream = stream
        self._inputs = inputs
        self._batches_with_signal = batches_with_signal
        self._scoring: dict[int, Scoring] = {}

    def sampled(self, batch: SampledBatch) -> None:
        """Begins to score a batch, from the stream's thread and before it is asked for."""
        self._scoring[batch.number] = begin_scoring(
            batch.samples, batch.prompts, self._inputs.tokenizer, self._inputs.reward
        )

    def collect(self, step: int, clock: Clock) -> TrainingBatch:
        """The batch of ``step``, counted from 1; phases ``sample`` (waiting for samples) and ``reward`` (waiting
        for their scores, or making them) of the clock.

        Metrics: those of :func:`~actors.run.vital_signs.sample_metrics` and :func:`~rl_backend.data.rewards.reward_metrics`,
        of all samples that were scored; ``reward_failures``, calls that failed, and ``groups_dropped`` because of them,
        unless such a call stops the run; ``tokens_per_second/sample``, of responses while engines were sampling;
        ``staleness_mean`` and ``staleness_max``, training steps by which the weights of the samples trained on are behind,
        and ``samples_dropped`` for being too old, when sampling ahead; ``batches_sampled`` and ``groups_without_signal``,
        with dynamic sampling.

        Raises:
            WeightVersionError: weights older than sampling ahead explains.
            RewardError: a reward function failed and is to stop the run, or failed for every prompt of the step.
        """
        config = self._config
        chosen: list[_Group] = []
        without_signal: list[_Group] = []
        scored: list[_Group] = []
        failures: list[str] = []
        dropped = taken = tokens = groups_dropped = 0
        seconds = 0.0
        # Without dynamic sampling one batch is a step's, whatever is dropped of it.
        while len(chosen) < config.prompts_per_step and taken != (self._batches_with_signal or 1):
            batch = self._stream.next(more=config.steps - step)
            clock.lap("sample")
            if batch.seconds:
                seconds += batch.seconds
                tokens += sum(len(sample.response_ids) for sample in batch.samples)
            age = self._age(batch, step)
            if age > config.max_staleness and config.stale_samples == "drop":
                dropped += len(batch.samples)
                if (scoring := self._scoring.pop(batch.number, None)) is not None:
                    scoring.cancel()
                continue
            taken += 1
            for group in self._score(batch):
                failures += [failure for score in group.scores for failure in score.failures]
                if any(score.dropped for score in group.scores):
                    groups_dropped += 1
                    continue
                scored.append(group)
                signal = self._batches_with_signal is None or bool(
                    groups_with_signal(group.rewards, group_size=len(group.rewards))[0]
                )
                (chosen if signal else without_signal).append(group)
            clock.lap("reward")
        if not scored:
            raise RewardError(f"step {step}: a reward function failed for every prompt of the step, such as: {failures[0]}")
        missing = config.prompts_per_step - len(chosen)
        chosen = chosen[: config.prompts_per_step] + without_signal[: max(missing, 0)]
        if missing > 0 and self._batches_with_signal is not None:
            # Each of the step's updates gets its part of the groups that teach nothing.
            random.Random(f"{config.seed} {step}").shuffle(chosen)

        metrics = sample_metrics(scored)
        if seconds:
            metrics["tokens_per_second/sample"] = tokens / seconds
        metrics |= reward_metrics([score for group in scored for score in group.scores])
        if config.rewards.on_failure != "stop":
            metrics["reward_failures"] = len(failures)
        if config.rewards.on_failure == "drop":
            metrics["groups_dropped"] = groups_dropped
        samples = [sample for group in chosen for sample in group.samples]
        if config.batches_ahead:
            ages = [self._age_of(_versions(sample), step) for sample in samples]
            metrics |= {"staleness_mean": statistics.fmean(ages), "staleness_max": max(ages), "samples_dropped": dropped}
        if self._batches_with_signal is not None:
            metrics |= {"batches_sampled": taken, "groups_without_signal": len(without_signal)}
        return TrainingBatch(
            [prompt for group in chosen for prompt in group.prompts],
            samples,
            [reward for group in chosen for reward in group.rewards],
            metrics,
            [score for group in chosen for score in group.scores],
            failures,
        )

    def _age(self, batch: SampledBatch, step: int) -> int:
        """Training steps between a batch's oldest weights and those that ``step`` begins with."""
        return self._require_explained(max(self._age_of(_versions(sample), step) for sample in batch.samples), step)

    def _score(self, batch: SampledBatch) -> Iterator[_Group]:
        if batch.number not in self._scoring:  # of a run that continues, or of another stream
            self.sampled(batch)
        scores = self._scoring.pop(batch.number).result()
        if self._config.shuffle_rewards:
            random.Random(f"{self._config.seed} {batch.number}").shuffle(scores)
        size = self._config.sampling.n
        for start in range(0, len(scores), size):
            rows = slice(start, start + size)
            yield _Group(batch.prompts[rows], batch.samples[rows], scores[rows])


def _versions(sample: Sample) -> Iterator[int]:
    return (span.version for span in sample.version_spans)
