"""Samples of a run of episodes: groups are played, ahead where that is allowed, and what failed is dropped."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from actors.collect.collector import Source, Staleness
from actors.collect.held_out import HeldOutEpisodes, HeldOutResult, HeldOutSet
from actors.collect.inputs import EpisodeInputs, Row
from actors.collect.sample_metrics import episode_metrics
from actors.collect.stream import BatchStream, Begun, DrawnBatch
from actors.collect.transcripts import describe_episodes
from actors.folder.checkpoints import StreamPosition
from actors.options.sampled_config import EpisodeConfig
from actors.rollout.config import SamplingConfig
from actors.rollout.messages import sample_seed
from actors.watch.console import warn
from actors.watch.metrics import Clock
from rl_backend.algorithm import episode_rewards
from rl_backend.algorithm.sequences import is_cut
from rl_backend.contracts import EpisodeFailedError
from rl_backend.data.rewards import Score
from rl_backend.environment import Episode, Limits, TokenSource
from rl_backend.environment.groups import FAILED, Group, GroupTask, PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes, with_reward, without_reward
from rl_backend.environment.protocol import Player
from rl_backend.environment.stepping import SteppedPlayer
from rl_backend.lab.text import count
from rl_backend.options.option_set import filled

# In place of a sample's number: a seed for what the group's environments draw, which no sample has.
_ENVIRONMENT = -1


def group_tasks(rows: Sequence[Row], number: int, n: int, seed: int) -> list[GroupTask]:
    """``n`` episodes of each row, with seeds that follow from the batch's number."""
    return [
        GroupTask(
            row,
            sample_seed(seed, number, index, _ENVIRONMENT),
            [sample_seed(seed, number, index, sample) for sample in range(n)],
        )
        for index, row in enumerate(rows)
    ]


class EpisodeStream(BatchStream[Row, Group]):
    """Groups of ``n`` episodes, one for each row; with ``during_episodes`` a push does not wait for their end."""

    def __init__(
        self,
        player: Player,
        source: TokenSource,
        options: PlayOptions,
        batches: Iterator[list[Row]],
        *,
        n: int,
        seed: int,
        ahead: int,
        during_episodes: bool = False,
        start: StreamPosition | None = None,
    ) -> None:
        self._player, self._source, self._options = player, source, options
        self._n, self._seed, self._during_episodes = n, seed, during_episodes
        self._playing: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        super().__init__(batches, ahead=ahead, start=start)

    @contextmanager
    def between_batches(self) -> Iterator[None]:
        """As of any stream; with ``during_episodes`` it waits for nothing, and engines take new weights between tokens."""
        if self._during_episodes:
            yield
            return
        with super().between_batches():
            yield

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        playing = self._playing
        super().__exit__(kind, error, traceback)
        if error is not None and playing is not None:
            loop, task = playing
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)
            # Until environments have closed what they opened, for which players have a limit of time.
            self._one_at_a_time.shutdown(wait=True)

    def _submit(self, number: int, prompts: list[Row]) -> Begun[Row, Group]:
        # One at a time: what the next step waits for does not share the engines with batches after it.
        return Begun(number, prompts, self._one_at_a_time.submit(self._draw, number, prompts))

    def _draw(self, number: int, prompts: list[Row]) -> DrawnBatch[Row, Group]:
        self._may_begin.wait()
        with self._sampling_now:
            began = time.perf_counter()
            groups = run_episodes(self._play(number, prompts))
            return DrawnBatch(number, prompts, groups, time.perf_counter() - began)

    async def _play(self, number: int, rows: Sequence[Row]) -> list[Group]:
        task = asyncio.current_task()
        assert task is not None
        self._playing = asyncio.get_running_loop(), task
        try:
            tasks = group_tasks(rows, number, self._n, self._seed)
            return await play_groups(self._player, tasks, self._source, self._options)
        finally:
            self._playing = None


# Batches in a row with nothing to train on; more of them would only cost hours.
_MOST_IN_VAIN = 10


@dataclass(frozen=True)
class EpisodeBatch:
    """What a step trains on. Lists have an entry for each episode, those of a group next to each other.

    Attributes:
        episodes: with the rewards of other ones, where ``shuffle_rewards`` is set.
        groups: number of each episode's group.
        rewards: of each episode; 0 for one that was cut off, with ``truncated="zero"``.
    """

    rows: list[Row]
    episodes: list[Episode]
    groups: list[int]
    rewards: list[float]
    metrics: dict[str, float]
    dropped: list[Episode] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class EpisodeSource(Source[Group, EpisodeBatch]):
    """Groups of episodes, one for each row."""

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
        player = inputs.player
        self._players = [
            player.ending_with((*each.sampling.stop_token_ids, *inputs.ends))
            if isinstance(player, SteppedPlayer)
            else player
            for each in inputs.held_out
        ]
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
        config = self._config
        fewest = min(config.least_episodes, config.sampling.n)
        return PlayOptions(limits, config.on_episode_failure, fewest, self._inputs.score, self._on_warning)

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
                self._players[index],
                self._engines(held_out.sampling),
                self.play_options(limits.replace(turn_tokens=held_out.sampling.max_new_tokens)),
                seed=self._config.seed,
                index=index,
            )
            for index, held_out in enumerate(self._inputs.held_out)
        ]


class EpisodeDraft:
    """The batch of one step while it is made.

    Adds to :func:`~actors.collect.sample_metrics.episode_metrics` ``episodes_dropped`` and ``groups_dropped``, with
    ``on_episode_failure="drop"``, and ``batches_cut_off``, passed over with ``truncated="mask"``.
    """

    def __init__(self, config: EpisodeConfig, step: int, on_skipped: Callable[[str], None]) -> None:
        self._config, self._step, self._on_skipped = config, step, on_skipped
        self._cut = 0
        self._batch: DrawnBatch[Row, Group] | None = None

    def add(self, batch: DrawnBatch[Row, Group], clock: Clock) -> bool:
        """Takes a batch, unless all of its episodes were cut off and are masked, which is refused after some in a row."""
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
        """The groups that are left; raises :class:`EpisodeFailedError` where there is none."""
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
    """Plays every row of a set, the ``index``-th. Seeds are the same at every step, so that weights alone differ."""
    # Steps of training are counted from 1, so its episodes have other seeds.
    tasks = group_tasks(held_out.prompts, -1 - index, held_out.sampling.n, seed)
    # A run trains on without a failed episode; a score without it would be too good.
    groups = run_episodes(play_groups(player, tasks, source, replace(options, on_failure="zero")))
    episodes = [episode for group in groups for episode in group.episodes]
    scores = [
        Score(episode.reward, failures=(f"{episode.stop}: {episode.error}",) if episode.stop in FAILED else ())
        for episode in episodes
    ]
    return HeldOutEpisodes(held_out, (), scores, episodes)


def turn_sampling(sampling: SamplingConfig, ends: Sequence[int]) -> SamplingConfig:
    """How turns are sampled, which end with ``ends``; lengths come with each turn, and further stop tokens."""
    names = ("temperature", "top_p", "top_k", "min_p", "stop_strings")
    given = {name: getattr(sampling, name) for name in names if sampling.is_set(name)}
    return SamplingConfig(**given, stop_token_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *ends])))


def _all_cut(batch: DrawnBatch[Row, Group]) -> bool:
    """Whether all episodes that have a turn to train on were cut off."""
    episodes = [episode for group in batch.samples for episode in group.episodes if _is_trained(episode)]
    return bool(episodes) and all(map(is_cut, episodes))


def _is_trained(episode: Episode) -> bool:
    # An environment may leave turns out, so that an episode with turns has nothing to train on.
    return any(any(segment.sampled) for segment in episode.segments)


def _played(batch: DrawnBatch[Row, Group]) -> Iterator[Episode]:
    for group in batch.samples:
        yield from (*group.episodes, *group.dropped)


def _versions(episode: Episode) -> set[int]:
    return {version for turn in episode.turns for version in turn.versions}


def _shuffled(groups: Sequence[Sequence[Episode]], seed: str) -> list[list[Episode]]:
    rewards = [episode.reward for group in groups for episode in group]
    random.Random(seed).shuffle(rewards)
    left = iter(rewards)
    # At the last tokens: those that earned a reward are not known of another episode.
    return [[with_reward(without_reward(episode), next(left)) for episode in group] for group in groups]
