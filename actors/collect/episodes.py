"""Samples of a run of episodes: groups of them are played, what failed is dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.collect.collector import Source, Staleness
from actors.collect.episode_stream import EpisodeStream, group_tasks
from actors.collect.held_out import HeldOutEpisodes, HeldOutResult, HeldOutSet
from actors.collect.inputs import EpisodeInputs, Row
from actors.collect.sample_metrics import episode_metrics
from actors.collect.stream import DrawnBatch
from actors.collect.transcripts import describe_episodes
from actors.folder.progress import StreamPosition
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import SamplingConfig
from actors.watch.clock import Clock
from actors.watch.console import warn
from rl_backend.algorithm import episode_rewards
from rl_backend.algorithm.sequences import is_cut
from rl_backend.contracts import EpisodeFailedError
from rl_backend.data.rewards import Score
from rl_backend.environment import Episode, Limits, TokenSource
from rl_backend.environment.groups import FAILED, Group, PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes, with_reward, without_reward
from rl_backend.environment.protocol import Player
from rl_backend.lab.text import count
from rl_backend.options.option_set import filled

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


class EpisodeSource(Source[Group, EpisodeBatch]):
    """Groups of episodes, one for each row.

    Args:
        config: sizes, limits and failures.
        inputs: rows, and who plays them.
        engines: for turns that are sampled so.
        start: where the stream begins.
        on_warning: told of batches that nothing can be trained on, and of environments that block all others.
    """

    def __init__(
        self,
        config: EpisodeConfig,
        inputs: EpisodeInputs,
        engines: Callable[[SamplingConfig], TokenSource],
        *,
        start: StreamPosition | None = None,
        on_warning: Callable[[str], None] = warn,
    ) -> None:
        self._config, self._inputs, self._engines, self._on_warning = config, inputs, engines, on_warning
        self.stream = EpisodeStream(
            inputs.player,
            engines(config.sampling),
            self.play_options(filled(config, "limits")),
            inputs.batches,
            n=config.sampling.n,
            seed=config.seed,
            ahead=config.batches_ahead,
            during_episodes=config.push_during_episodes,
            start=start,
        )

    def play_options(self, limits: Limits) -> PlayOptions:
        """How groups are played within these limits."""
        config = self._config
        return PlayOptions(limits, config.on_episode_failure, config.least_episodes, self._inputs.score, self._on_warning)

    def versions(self, batch: DrawnBatch[Row, Group]) -> list[set[int]]:
        return list(map(_versions, _played(batch)))

    def count_tokens(self, batch: DrawnBatch[Row, Group]) -> int:
        return sum(len(turn.token_ids) for episode in _played(batch) for turn in episode.turns)

    def discard(self, batch: DrawnBatch[Row, Group]) -> None:
        pass

    def draft(self, step: int) -> EpisodeDraft:
        return EpisodeDraft(self._config, step, self._on_warning)

    def sampled_ids(self, batch: EpisodeBatch) -> Iterable[Sequence[int]]:
        return (turn.token_ids for episode in batch.episodes for turn in episode.turns)

    def describe(self, batch: EpisodeBatch) -> list[dict[str, Any]]:
        most, tokenizer = self._config.samples_logged, self._inputs.tokenizer
        lines = describe_episodes(batch.episodes[:most], tokenizer)
        left = max(most - len(lines), 0)
        return [*lines, *describe_episodes(batch.dropped[:left], tokenizer, dropped=True)]

    def failed(self, number: int) -> str:
        return count(number, "episode")

    def answer_held_out(self) -> list[HeldOutResult]:
        limits = filled(self._config, "limits")
        return [
            play_held_out(
                held_out,
                self._inputs.player,
                self._engines(held_out.sampling),
                self.play_options(limits.replace(turn_tokens=held_out.sampling.max_new_tokens)),
                seed=self._config.seed,
                index=index,
            )
            for index, held_out in enumerate(self._inputs.held_out)
        ]


class EpisodeDraft:
    """The batch of one step while it is made.

    Metrics: those of :func:`~actors.collect.sample_metrics.episode_metrics`; ``episodes_dropped`` and ``groups_dropped``,
    with ``on_episode_failure="drop"``; ``batches_cut_off``, with ``truncated="mask"``, passed over because all of their
    episodes were cut off.
    """

    def __init__(self, config: EpisodeConfig, step: int, on_skipped: Callable[[str], None]) -> None:
        self._config, self._step, self._on_skipped = config, step, on_skipped
        self._cut = 0
        self._batch: DrawnBatch[Row, Group] | None = None

    def add(self, batch: DrawnBatch[Row, Group], clock: Clock) -> bool:
        """Takes a batch, unless all of its episodes were cut off and are masked.

        Raises:
            EpisodeFailedError: an episode failed and is to stop the run, or too many batches in a row were passed over.
        """
        if self._config.truncated == "mask" and _all_cut(batch):
            self._cut += 1
            problem = "every episode was cut off, and truncated='mask' trains on none of them"
            if self._cut == _MOST_IN_VAIN:
                raise EpisodeFailedError(
                    f"step {self._step}: {problem}, in {self._cut} batches in a row; raise the limits, such as max_turns, "
                    "or set truncated to keep or zero"
                )
            self._on_skipped(f"step {self._step}: {problem}; the next batch is played in its place")
            return False
        self._batch = batch
        return True

    def finish(self, rate: dict[str, float], staleness: Staleness) -> EpisodeBatch:
        """The groups that are left.

        Raises:
            EpisodeFailedError: no group of the step is.
        """
        assert self._batch is not None, "finish comes after an add that was enough"
        config, batch = self._config, self._batch
        dropped = [episode for group in batch.samples for episode in group.dropped]
        failed = [episode for episode in _played(batch) if episode.stop in FAILED]
        failures = [f"{episode.stop} after {len(episode.turns)} turns: {episode.error}" for episode in failed]
        kept = [(row, group.episodes) for row, group in zip(batch.prompts, batch.samples, strict=True) if group.episodes]
        if not any(_is_trained(episode) for _, episodes in kept for episode in episodes):
            such = f", such as: {failures[0]}" if failures else ""
            raise EpisodeFailedError(f"step {self._step}: no episode of the step has a turn to train on{such}")
        groups = [list(episodes) for _, episodes in kept]
        if config.shuffle_rewards:
            groups = _shuffled(groups, f"{config.seed} {batch.number}")
        metrics = episode_metrics(groups, dropped) | rate
        if config.on_episode_failure == "drop":
            metrics |= {"episodes_dropped": len(dropped), "groups_dropped": len(batch.samples) - len(groups)}
        if config.truncated == "mask":
            metrics["batches_cut_off"] = self._cut
        episodes = [episode for group in groups for episode in group]
        return EpisodeBatch(
            rows=[row for (row, _), group in zip(kept, groups, strict=True) for _ in group],
            episodes=episodes,
            groups=[number for number, group in enumerate(groups) for _ in group],
            rewards=episode_rewards(episodes, config.truncated),
            metrics=metrics | staleness(filter(None, map(_versions, episodes))),
            dropped=dropped,
            failures=failures,
        )


def play_held_out(
    held_out: HeldOutSet,
    player: Player,
    source: TokenSource,
    options: PlayOptions,
    *,
    seed: int,
    index: int,
) -> HeldOutEpisodes:
    """Plays every row of a set. Seeds are the same at every step, so that weights alone differ.

    Args:
        options: for this set, but an episode that fails counts as zero.
        index: of the set.
    """
    # Steps of training are counted from 1, so its episodes have other seeds.
    tasks = group_tasks(held_out.prompts, -1 - index, held_out.sampling.n, seed)
    groups = run_episodes(play_groups(player, tasks, source, replace(options, on_failure="zero")))
    episodes = [episode for group in groups for episode in group.episodes]
    scores = [
        Score(episode.reward, failures=(f"{episode.stop}: {episode.error}",) if episode.stop in FAILED else ())
        for episode in episodes
    ]
    return HeldOutEpisodes(held_out, (), scores, episodes)


def turn_sampling(sampling: SamplingConfig, ends: Sequence[int]) -> SamplingConfig:
    """How turns are sampled; lengths come with each turn, and further stop tokens.

    Args:
        ends: tokens that end any turn, see :class:`~actors.collect.inputs.EpisodeInputs`.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "stop_strings")
    given = {name: getattr(sampling, name) for name in names if sampling.is_set(name)}
    return SamplingConfig(**given, stop_token_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *ends])))


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
