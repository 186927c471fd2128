"""Samples of a run of prompts: engines answer, reward functions score, dynamic sampling chooses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.collect.collector import Source, Staleness
from actors.collect.held_out import HeldOutResult, answer
from actors.collect.inputs import Inputs
from actors.collect.sample_metrics import ScoredGroup, begin_scoring, sample_metrics
from actors.collect.stream import SampledBatch, SampleStream
from actors.collect.transcripts import describe_samples
from actors.folder.checkpoints import StreamPosition
from actors.options.sampled_config import RLConfig
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import Sample
from actors.watch.metrics import Clock
from rl_backend.algorithm import groups_with_signal
from rl_backend.contracts import RewardError
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import Score, Scoring, reward_metrics
from rl_backend.lab.text import count


@dataclass(frozen=True)
class TrainingBatch:
    """What a step trains on: groups of ``samples_per_prompt``, an entry of each list per sample.

    There are ``prompts_per_step`` groups, or fewer where reward functions failed and ``on_reward_failure`` is drop, whose
    messages are in ``failures`` all the same.
    """

    prompts: list[Prompt]
    samples: list[Sample]
    rewards: list[float]
    metrics: dict[str, float]
    scores: list[Score] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class PromptSource(Source[Sample, TrainingBatch]):
    """Responses of engines to prompts, with their scores.

    Args:
        adapter: the LoRA tenant that samples; None for the weights alone.
        start: where the stream begins.
        batches_with_signal: with a number, dynamic sampling: groups of equal rewards are replaced by groups of further
            batches, of at most so many; what is missing then is filled up with them.
    """

    def __init__(
        self,
        config: RLConfig,
        inputs: Inputs,
        rollout: RolloutGroup,
        *,
        adapter: str | None = None,
        start: StreamPosition | None = None,
        batches_with_signal: int | None = None,
    ) -> None:
        self._config, self._inputs, self._rollout, self._adapter = config, inputs, rollout, adapter
        self._batches_with_signal = batches_with_signal
        self._scoring: dict[int, Scoring] = {}
        self._beginning, self._closed = threading.Lock(), False
        self.stream = SampleStream(
            rollout,
            inputs.batches,
            inputs.sampling,
            seed=config.seed,
            ahead=config.batches_ahead,
            adapter=adapter,
            start=start,
            on_sampled=self.begin_scoring,
        )

    def begin_scoring(self, batch: SampledBatch) -> None:
        # From the stream's thread: scores are ready, or nearly so, when the step asks for the batch.
        with self._beginning:
            if not self._closed:  # after an error nobody has waited for that thread
                self._scoring[batch.number] = begin_scoring(
                    batch.samples, batch.prompts, self._inputs.tokenizer, self._inputs.reward
                )

    def versions(self, batch: SampledBatch) -> list[set[int]]:
        return list(map(_versions, batch.samples))

    def count_tokens(self, batch: SampledBatch) -> int:
        return sum(len(sample.response_ids) for sample in batch.samples)

    def discard(self, batch: SampledBatch) -> None:
        if (scoring := self._scoring.pop(batch.number, None)) is not None:
            scoring.cancel()

    def draft(self, step: int) -> PromptDraft:
        return PromptDraft(self._config, step, self.scored_groups, self._batches_with_signal)

    def scored_groups(self, batch: SampledBatch) -> Iterator[ScoredGroup]:
        """The responses to each prompt, when they are all scored."""
        if batch.number not in self._scoring:  # of a run that continues, or of another stream
            self.begin_scoring(batch)
        scores = self._scoring.pop(batch.number).result()
        if self._config.shuffle_rewards:
            random.Random(f"{self._config.seed} {batch.number}").shuffle(scores)
        size = self._config.sampling.n
        for start in range(0, len(scores), size):
            rows = slice(start, start + size)
            yield ScoredGroup(batch.prompts[rows], batch.samples[rows], scores[rows])

    def sampled_ids(self, batch: TrainingBatch) -> Iterable[Sequence[int]]:
        return (sample.response_ids for sample in batch.samples)

    def describe(self, batch: TrainingBatch) -> list[dict[str, Any]]:
        logged = slice(self._config.samples_logged)
        return describe_samples(batch.samples[logged], batch.prompts[logged], batch.scores[logged], self._inputs.tokenizer)

    def failed(self, number: int) -> str:
        return f"{count(number, 'call')} of reward functions"

    def answer_held_out(self) -> list[HeldOutResult]:
        inputs, seed = self._inputs, self._config.seed
        return answer(self._rollout, inputs.held_out, inputs.tokenizer, inputs.reward, seed=seed, adapter=self._adapter)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            with self._beginning:
                self._closed = True
            self._inputs.reward.close()


class PromptDraft:
    """The batch of one step while it is made: the phase ``reward`` of the clock, waiting for scores or making them.

    Adds to :func:`~actors.collect.sample_metrics.sample_metrics` and :func:`~rl_backend.data.rewards.reward_metrics`
    ``reward_failures``, ``rewards_failed`` (their share) and ``groups_dropped``, unless a failure stops the run;
    ``batches_sampled`` and ``groups_without_signal``, with dynamic sampling.
    """

    def __init__(
        self,
        config: RLConfig,
        step: int,
        scored_groups: Callable[[SampledBatch], Iterable[ScoredGroup]],
        batches_with_signal: int | None,
    ) -> None:
        self._config, self._step, self._scored_groups = config, step, scored_groups
        self._batches_with_signal = batches_with_signal
        self._chosen: list[ScoredGroup] = []
        self._without_signal: list[ScoredGroup] = []
        self._scored: list[ScoredGroup] = []
        self._failures: list[str] = []
        self._taken = self._dropped = self._answers = 0

    def add(self, batch: SampledBatch, clock: Clock) -> bool:
        """Scores a batch, whose groups are chosen, kept for filling up, or dropped because a call failed."""
        self._taken += 1
        for group in self._scored_groups(batch):
            self._failures += [failure for score in group.scores for failure in score.failures]
            self._answers += len(group.scores)
            if any(score.dropped for score in group.scores):
                self._dropped += 1
                continue
            self._scored.append(group)
            signal = self._batches_with_signal is None or bool(
                groups_with_signal(group.rewards, group_size=len(group.rewards))[0]
            )
            (self._chosen if signal else self._without_signal).append(group)
        clock.lap("reward")
        # Without dynamic sampling one batch is a step's, whatever is dropped of it.
        return len(self._chosen) >= self._config.prompts_per_step or self._taken == (self._batches_with_signal or 1)

    def finish(self, rate: dict[str, float], staleness: Staleness) -> TrainingBatch:
        """The groups with a signal, filled up with others; refused where a function failed for every prompt."""
        config, step, scored, failures = self._config, self._step, self._scored, self._failures
        if not scored:
            raise RewardError(f"step {step}: a reward function failed for every prompt of the step, such as: {failures[0]}")
        missing = config.prompts_per_step - len(self._chosen)
        chosen = self._chosen[: config.prompts_per_step] + self._without_signal[: max(missing, 0)]
        if missing > 0 and self._batches_with_signal is not None:
            # Each of the step's updates gets its part of the groups that teach nothing.
            random.Random(f"{config.seed} {step}").shuffle(chosen)
        samples = [sample for group in chosen for sample in group.samples]
        metrics = sample_metrics(scored) | rate | reward_metrics([score for group in scored for score in group.scores])
        if config.rewards.on_failure != "stop":
            metrics |= {"reward_failures": len(failures), "rewards_failed": min(len(failures) / self._answers, 1)}
        if config.rewards.on_failure == "drop":
            metrics["groups_dropped"] = self._dropped
        metrics |= staleness(map(_versions, samples))
        if self._batches_with_signal is not None:
            metrics |= {"batches_sampled": self._taken, "groups_without_signal": len(self._without_signal)}
        return TrainingBatch(
            [prompt for group in chosen for prompt in group.prompts],
            samples,
            [reward for group in chosen for reward in group.rewards],
            metrics,
            [score for group in chosen for score in group.scores],
            failures,
        )


def _versions(sample: Sample) -> set[int]:
    return {span.version for span in sample.version_spans}
