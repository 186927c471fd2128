"""Batches of episodes in order, played while earlier ones are trained on when that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from actors.collect.inputs import Row
from actors.collect.stream import BatchStream, DrawnBatch
from actors.folder.progress import StreamPosition
from actors.rollout.messages import sample_seed
from rl_backend.environment import TokenSource
from rl_backend.environment.groups import Group, GroupTask, PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes
from rl_backend.environment.protocol import Player

_ENVIRONMENT = -1
"""In place of the number of a sample: the seed for what the environments of a group draw."""


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
    """Groups of episodes, one for each row.

    A checkpoint keeps no episodes that were played ahead: a run that continues plays them again.

    Args:
        player: plays an episode.
        source: engines.
        options: how groups are played.
        n: episodes of each row.
        seed: with the number of the batch it fixes all seeds.
        during_episodes: a push does not wait for the end of episodes.
        batches, ahead, start: see :class:`~actors.collect.stream.BatchStream`.
    """

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

    def _draw(self, number: int, prompts: list[Row]) -> DrawnBatch[Row, Group]:
        return DrawnBatch(number, prompts, run_episodes(self._play(number, prompts)))

    async def _play(self, number: int, rows: Sequence[Row]) -> list[Group]:
        task = asyncio.current_task()
        assert task is not None
        self._playing = asyncio.get_running_loop(), task
        try:
            tasks = group_tasks(rows, number, self._n, self._seed)
            return await play_groups(self._player, tasks, self._source, self._options)
        finally:
            self._playing = None
