"""From groups of episodes to the batch of a training step: staleness, failures, metrics."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.rollout.stream import DrawnBatch
from actors.run.clock import Clock
from actors.run.console import warn
from actors.run.episode_metrics import episode_metrics
from actors.run.episode_stream import EpisodeStream, Row
from actors.run.sampled_config import EpisodeConfig
from actors.run.versions import VersionedCollector
from rl_backend.algorithm import episode_rewards
from rl_backend.algorithm.episodes import is_cut
from rl_backend.contracts import EpisodeFailedError
from rl_backend.environment import Episode
from rl_backend.environment.groups import FAILED, Group
from rl_backend.environment.playing import with_reward, without_reward

_MOST_IN_VAIN = 10
"""Batches in a row of which nothing can be trained on."""


@dataclass(frozen=True)
class EpisodeBatch:
    """What a step trains on. Lists have an entry for each episode, those of a group next to each other.

    Attributes:
        rows: of the data set.
        episodes: with the rewards of other ones, where ``shuffle_rewards`` is set.
        groups: number of each episode's group.
        rewards: of each episode; 0 for one that was cut off, with ``truncated="zero"``.
        dropped: episodes that were left out.
        failures: what went wrong in those that failed.
    """

    rows: list[Row]
    episodes: list[Episode]
    groups: list[int]
    rewards: list[float]
    metrics: dict[str, float]
    dropped: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class EpisodeCollector(VersionedCollector[EpisodeBatch]):
    """Takes a batch of groups from the stream for each step.

    Args:
        config: sizes, staleness and failures.
        stream: groups of episodes.
        earlier: the :attr:`state` of the run that this one continues; empty at the first step.
        on_skipped: told of a batch that nothing can be trained on.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        stream: EpisodeStream,
        *,
        earlier: Mapping[str, Any] | None = None,
        on_skipped: Callable[[str], None] = warn,
    ) -> None:
        super().__init__(config, earlier)
        self._on_skipped = on_skipped
        self._config = config
        self._stream = stream

    def collect(self, step: int, clock: Clock) -> EpisodeBatch:
        """The batch of ``step``, counted from 1; the phase ``sample`` of the clock.

        Metrics: those of :func:`~actors.run.episode_metrics.episode_metrics`; ``tokens_per_second/sample``, of sampled
        tokens while episodes were played; ``episodes_dropped`` and ``groups_dropped``, with
        ``on_episode_failure="drop"``; ``batches_cut_off``, with ``truncated="mask"``, passed over because
        all of their episodes were cut off; when sampling ahead ``staleness_mean``, ``staleness_max`` and
        ``samples_dropped``, episodes that were too old.

        Raises:
            WeightVersionError: weights older than sampling ahead explains.
            EpisodeFailedError: an episode failed and is to stop the run, no group of the step is left, or with
                ``truncated="mask"`` all episodes of too many batches in a row were cut off.
        """
        config, stale, cut, seconds, tokens = self._config, 0, 0, 0.0, 0
        while True:
            batch = self._stream.next(more=config.steps - step)
            clock.lap("sample")
            seconds += batch.seconds
            tokens += sum(len(turn.token_ids) for episode in _played(batch) for turn in episode.turns)
            ages = [self._age_of(versions, step) for episode in _played(batch) if (versions := _versions(episode))]
            age = self._require_explained(max(ages, default=0), step)
            if age > config.max_staleness and config.stale_samples == "drop":
                stale += len(list(_played(batch)))
                continue
            if config.truncated != "mask" or not _all_cut(batch):
                break
            cut += 1
            self._skip(step, cut)
        dropped = [episode for group in batch.samples for episode in group.dropped]
        failed = [episode for episode in _played(batch) if episode.stop in FAILED]
        failures = [f"{episode.stop} after {len(episode.turns)} turns: {episode.error}" for episode in failed]
        kept = [(row, group.episodes) for row, group in zip(batch.prompts, batch.samples, strict=True) if group.episodes]
        if not any(_is_trained(episode) for _, episodes in kept for episode in episodes):
            such = f", such as: {failures[0]}" if failures else ""
            raise EpisodeFailedError(f"step {step}: no episode of the step has a turn to train on{such}")
        groups = (
            _shuffled([list(episodes) for _, episodes in kept], f"{config.seed} {batch.number}")
            if (config.shuffle_rewards)
            else [list(episodes) for _, episodes in kept]
        )
        metrics = episode_metrics(groups, dropped)
        if seconds:
            metrics["tokens_per_second/sample"] = tokens / seconds
        if config.on_episode_failure == "drop":
            metrics["episodes_dropped"] = len(dropped)
            metrics["groups_dropped"] = len(batch.samples) - len(groups)
        if config.truncated == "mask":
            metrics["batches_cut_off"] = cut
        episodes = [episode for group in groups for episode in group]
        if config.batches_ahead:
            ages = [self._age_of(versions, step) for episode in episodes if (versions := _versions(episode))]
            metrics |= {"staleness_mean": statistics.fmean(ages), "staleness_max": max(ages), "samples_dropped": stale}
        return EpisodeBatch(
            rows=[row for (row, _), group in zip(kept, groups, strict=True) for _ in group],
            episodes=episodes,
            groups=[number for number, group in enumerate(groups) for _ in group],
            rewards=episode_rewards(episodes, config.truncated),
            metrics=metrics,
            dropped=dropped,
            failures=failures,
        )

    def _skip(self, step: int, times: int) -> None:
        problem = "every episode was cut off, and truncated='mask' trains on none of them"
        if times == _MOST_IN_VAIN:
            raise EpisodeFailedError(
                f"step {step}: {problem}, in {times} batches in a row; raise the limits, such as max_turns, or set "
                "truncated to keep or zero"
            )
        self._on_skipped(f"step {step}: {problem}; the next batch is played in its place")


def _all_cut(batch: DrawnBatch[Row, Group]) -> bool:
    """Whether all episodes that have a turn to train on were cut off."""
    episodes = [episode for group in batch.samples for episode in group.episodes if _is_trained(episode)]
    return bool(episodes) and all(map(is_cut, episodes))


def _is_trained(episode: Episode) -> bool:
    """Whether it has a token to train on: a turn that no environment has left out."""
    return any(any(segment.sampled) for segment in episode.segments)


def _played(batch: DrawnBatch[Row, Group]) -> Iterator[Episode]:
    for group in batch.samples:
        yield from (*group.episodes, *group.dropped)


def _versions(episode: Episode) -> set[int]:
    """Of the weights that sampled its tokens."""
    return {version for turn in episode.turns for version in turn.versions}


def _shuffled(groups: Sequence[Sequence[Episode]], seed: str) -> list[list[Episode]]:
    """The same rewards on other episodes, at their last tokens."""
    rewards = [episode.reward for group in groups for episode in group]
    random.Random(seed).shuffle(rewards)
    left = iter(rewards)
    return [[with_reward(without_reward(episode), next(left)) for episode in group] for group in groups]
