"""Plays one episode to its end, whatever its player does, and the event loops that episodes run in."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

from rl_backend.contracts import ConfigError, EpisodeEndError, EpisodeFailedError, RewardError, RolloutError
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.data.rewards.worker_pool import Raised, TimeLimitError, in_thread
from rl_backend.environment.protocol import Episode, Limits, Player, Result, Stop, TokenSource
from rl_backend.environment.sampler import RecordingSampler
from rl_backend.environment.user_code import as_exception, logger, task_name

CLOSING_SECONDS = 10.0
"""What a player has for its last words when it is ended from outside."""
OF_ENVIRONMENTS = "episode/"
"""Before the name of an environment's metric that one of every episode has too, such as ``turns``."""
_OF_THE_RUN = (ConfigError, RolloutError, EpisodeFailedError, RewardError)
"""Errors that are no single episode's: they end the run."""


async def play_episode(
    player: Player,
    row: Mapping[str, Any],
    source: TokenSource,
    *,
    sampling_seed: int,
    seed: int,
    limits: Limits | None = None,
) -> Episode:
    """Plays an episode. What the player raises ends it with ``stop="error"``. Of ``seed`` the environment draws.

    Raises:
        ConfigError, RolloutError, EpisodeFailedError, RewardError: what is no single episode's failure.
        asyncio.CancelledError: after the player has closed what it opened.
    """
    limits = limits or Limits()
    sampler = RecordingSampler(source, sampling_seed=sampling_seed, seed=seed, limits=limits)
    begun = time.monotonic()
    playing = asyncio.create_task(_played(player, row, sampler), name=task_name(player))
    try:
        done, _ = await asyncio.wait([playing], timeout=limits.episode_seconds)
    except asyncio.CancelledError:
        sampler.end("cancelled", "the episode was cancelled")
        await _end(playing)
        raise
    if done and playing.cancelled():
        # Nobody ended it: a session or a task of its own was, and that is this episode's failure.
        result = Result(stop="error", error="CancelledError: what the player waited for was cancelled")
    elif done:
        result = playing.result()
    else:
        sampler.end("timeout", f"limits.episode_seconds={limits.episode_seconds:g}")
        await _end(playing)
        result = Result(stop="timeout", error=f"limits.episode_seconds={limits.episode_seconds:g}")
    return _episode(sampler, result, time.monotonic() - begun)


def without_reward(episode: Episode) -> Episode:
    segments = [replace(segment, rewards=(0.0,) * len(segment.rewards)) for segment in episode.segments]
    return replace(episode, segments=tuple(segments), reward=0.0)


def with_reward(episode: Episode, value: float) -> Episode:
    segments = list(episode.segments)
    if segments:
        *before, last = segments[-1].rewards
        segments[-1] = replace(segments[-1], rewards=(*before, last + value))
    return replace(episode, segments=tuple(segments), reward=episode.reward + value)


def ended_by(end: EpisodeEndError | TimeLimitError, metrics: Mapping[str, float] | None = None) -> Result:
    if isinstance(end, EpisodeEndError):
        return Result(metrics=metrics or {}, stop=cast(Stop, end.details["stop"]), error=end.message)
    return Result(metrics=metrics or {}, stop="timeout", error="a step took longer than limits.step_seconds")


async def _played(player: Player, row: Mapping[str, Any], sampler: RecordingSampler) -> Result:
    try:
        # A copy: the other episodes of the row have it too.
        result = await player(deepcopy(row), sampler)
    except (EpisodeEndError, TimeLimitError) as end:
        return ended_by(end)
    except _OF_THE_RUN:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001, a user's code may raise anything, and it ends this episode alone
        return Result(stop="error", error=what_it_raised(error))
    if not isinstance(result, Result):
        return Result(stop="error", error=f"the player returned {type(result).__name__}; expected a Result")
    try:
        reward, metrics = float(result.reward), {str(name): float(value) for name, value in result.metrics.items()}
    except (TypeError, ValueError, AttributeError) as error:
        return Result(stop="error", error=f"the player returned what is no number in its reward or its metrics: {error}")
    if not math.isfinite(reward):
        return Result(stop="error", error=f"the player returned a reward of {reward}; it must be a finite number")
    return replace(result, reward=reward, metrics=metrics)


async def _end(playing: asyncio.Future[Result]) -> None:
    # Whoever cancels us meanwhile: the player must have closed what it opened.
    playing.cancel()
    until = time.monotonic() + CLOSING_SECONDS
    while not playing.done() and (left := until - time.monotonic()) > 0:
        try:
            await asyncio.wait([playing], timeout=left)
        except asyncio.CancelledError:
            continue
    if playing.done() and not playing.cancelled():
        playing.exception()  # looked at, so that asyncio does not report it as forgotten


def _episode(sampler: RecordingSampler, result: Result, seconds: float) -> Episode:
    ours = {**sampler.metrics(), "seconds": seconds, "environment_seconds": max(0.0, seconds - sampler.engine_seconds)}
    theirs = {OF_ENVIRONMENTS + name if name in ours else name: value for name, value in result.metrics.items()}
    episode = Episode(
        segments=sampler.segments,
        reward=sum(turn.reward for turn in sampler.turns),
        metrics={**ours, **theirs},
        turns=sampler.turns,
        stop=result.stop,
        error=result.error,
        seed=sampler.sampling_seed,
    )
    return with_reward(episode, result.reward) if result.reward else episode


def run_episodes[T](coroutine: Coroutine[Any, Any, T], *, closing_seconds: float = CLOSING_SECONDS) -> T:
    """As ``asyncio.run``, which waits without a limit for tasks that do not let themselves be cancelled, and for minutes for
    calls of ``asyncio.to_thread``. Here calls get a daemon thread each, and tasks have ``closing_seconds``.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(_DaemonThreads())
    main: list[asyncio.Task[T]] = []

    async def whole() -> T:
        main.extend(task for task in [asyncio.current_task()] if task is not None)
        return await coroutine

    try:
        return runner.run(whole())
    finally:
        try:
            # After a Ctrl-C this one is left too: episodes close what they opened, for which players have a limit of time.
            _end_tasks(loop, [task for task in main if not task.done()], None)
            _end_tasks(loop, asyncio.all_tasks(loop), closing_seconds)
            _end_tasks(loop, [loop.create_task(loop.shutdown_asyncgens())], closing_seconds, cancel=False)
        finally:
            # Not the runner's: it would wait for the tasks that are left.
            asyncio.set_event_loop(None)
            loop.close()


def _end_tasks(
    loop: asyncio.AbstractEventLoop, tasks: Iterable[asyncio.Task[Any]], seconds: float | None, *, cancel: bool = True
) -> None:
    waiting = list(tasks)
    if not waiting:
        return
    for task in waiting if cancel else ():
        task.cancel()
    done, left = loop.run_until_complete(asyncio.wait(waiting, timeout=seconds))
    for task in done:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as forgotten
    if left:
        names = ", ".join(sorted({task.get_name() for task in left}))
        logger.warning("%d tasks of episodes did not end when they were cancelled, and are left: %s", len(left), names)


class _DaemonThreads(ThreadPoolExecutor):
    def submit[**P, T](self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        called: Future[T] = Future()
        called.set_running_or_notify_cancel()

        def settle(done: Future[Any]) -> None:
            if isinstance(result := done.result(), Raised):
                called.set_exception(as_exception(result))
            else:
                called.set_result(result)

        in_thread(partial(function, *args, **kwargs)).add_done_callback(settle)
        return called
