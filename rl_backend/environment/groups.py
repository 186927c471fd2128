"""Groups of episodes of the same task, played at once, and the handling of failed episodes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from rl_backend.contracts import BatchError, EpisodeFailedError
from rl_backend.data.rewards import OnFailure, score_value
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.environment.playing import play_episode, with_reward, without_reward
from rl_backend.environment.protocol import Episode, Limits, Player, Score, TokenSource
from rl_backend.environment.user_code import Caller, logger, watched_loop

FAILED = frozenset({"error", "timeout", "cancelled"})
"""Reasons that ``on_failure`` is about. A limit of turns or tokens is no failure: the episode is cut."""


@dataclass(frozen=True)
class GroupTask:
    """Episodes to be played, one for each of ``sampling_seeds``; of ``seed`` all environments of the group draw the same."""

    row: Mapping[str, Any]
    seed: int
    sampling_seeds: Sequence[int]


@dataclass(frozen=True)
class Group:
    """Episodes of the same task, in the order of their seeds.

    ``dropped`` have failed, or are all, where the group is too small without those that have.
    """

    episodes: Sequence[Episode]
    dropped: Sequence[Episode] = ()


@dataclass(frozen=True)
class PlayOptions:
    """How groups are played.

    Attributes:
        limits: of each episode, and of episodes at once.
        on_failure: of an episode that raises, hangs or is cancelled: ``stop`` raises, ``zero`` keeps it with a reward of
            zero, ``drop`` leaves it out.
        fewest: episodes that a group needs; with fewer left, ``drop`` leaves all of it out.
        score: of the episodes of a group that did not fail; None without.
        on_blocked: told, in a thread, which environment or player blocks the event loop, and for how long already.
    """

    limits: Limits = field(default_factory=Limits)
    on_failure: OnFailure = "stop"
    fewest: int = 2
    score: Score | None = None
    on_blocked: Callable[[str], None] = logger.warning


async def play_groups(
    player: Player,
    tasks: Sequence[GroupTask],
    source: TokenSource,
    options: PlayOptions | None = None,
    *,
    on_group: Callable[[int, Group], None] = lambda index, group: None,
) -> list[Group]:
    """Plays all episodes at once, as many as ``limits.concurrent`` allows, and returns groups in the order of ``tasks``.
    ``on_group`` is called with place and group as each ends.

    Raises:
        EpisodeFailedError: with ``on_failure="stop"``, an episode failed; or environments that nothing can end.
        ConfigError, RolloutError: what is no single episode's failure.
        asyncio.CancelledError: after all players have closed what they opened. The same goes for the errors above.
    """
    options = options or PlayOptions()
    at_once = nullcontext() if options.limits.concurrent is None else asyncio.Semaphore(options.limits.concurrent)

    async def group(index: int, task: GroupTask) -> Group:
        played = await _all_or_none([_one(player, task, each, source, options, at_once) for each in task.sampling_seeds])
        found = await _judged(played, options)
        on_group(index, found)
        return found

    with watched_loop(options.on_blocked):
        return await _all_or_none([group(index, task) for index, task in enumerate(tasks)])


async def _one(
    player: Player, task: GroupTask, sampling_seed: int, source: TokenSource, options: PlayOptions, at_once: Any
) -> Episode:
    async with at_once:
        episode = await play_episode(
            player, task.row, source, sampling_seed=sampling_seed, seed=task.seed, limits=options.limits
        )
    if episode.stop in FAILED and options.on_failure == "stop":
        raise EpisodeFailedError(
            f"an episode ended with {episode.stop} after {len(episode.turns)} turns: {episode.error}; correct it, or set "
            "on_failure to zero or drop",
            stop=episode.stop,
            sampling_seed=sampling_seed,
        )
    return episode


async def _judged(played: Sequence[Episode], options: PlayOptions) -> Group:
    whole = [episode.stop not in FAILED for episode in played]
    scores = iter(await _scores([each for each, good in zip(played, whole, strict=True) if good], options.score))
    scored = [
        with_reward(episode, next(scores)) if good else without_reward(episode)
        for episode, good in zip(played, whole, strict=True)
    ]
    if options.on_failure != "drop" or all(whole):
        return Group(tuple(scored))
    left = tuple(each for each, good in zip(scored, whole, strict=True) if good)
    # An advantage compares episodes of a group; of one alone it would be the bare reward.
    if len(left) < options.fewest:
        return Group((), tuple(scored))
    return Group(left, tuple(each for each, good in zip(scored, whole, strict=True) if not good))


async def _scores(episodes: Sequence[Episode], score: Score | None) -> list[float]:
    if score is None or not episodes:
        return [0.0] * len(episodes)
    # Copies of what could be changed: the function is a user's.
    given = tuple(replace(each, metrics=dict(each.metrics)) for each in episodes)
    try:
        found = [score_value(each) for each in await Caller()(score, given)]
    except BatchError as error:
        raise EpisodeFailedError(f"score {error.message.removeprefix('the reward function ')}") from error
    except Exception as error:  # what a user's function raises
        raise EpisodeFailedError(f"score raised {what_it_raised(error)}") from error
    if len(found) != len(episodes):
        raise EpisodeFailedError(f"score returned {len(found)} rewards for {len(episodes)} episodes; expected one for each")
    return found


async def _all_or_none[T](coroutines: Sequence[Awaitable[T]]) -> list[T]:
    """All results; where one raises, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
