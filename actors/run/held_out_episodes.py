"""Episodes of held-out sets, and what their rewards come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.run.episode_stream import group_tasks
from actors.run.eval_sets import HeldOutSet
from actors.run.held_out import HeldOutResult
from actors.run.transcripts import describe_episodes
from rl_backend.data.rewards import Score
from rl_backend.environment import Episode, TokenSource
from rl_backend.environment.groups import FAILED, PlayOptions, play_groups
from rl_backend.environment.playing import run_episodes
from rl_backend.environment.protocol import Player


@dataclass(frozen=True)
class HeldOutEpisodes(HeldOutResult):
    """Episodes of a held-out set, row by row; ``samples`` is empty.

    Attributes:
        episodes: one that failed has a reward of 0.
    """

    episodes: Sequence[Episode] = ()

    @property
    def sampled_ids(self) -> Iterable[Sequence[int]]:
        """Of each turn."""
        return (turn.token_ids for episode in self.episodes for turn in episode.turns)

    def lines(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Lines of ``held_out.jsonl``."""
        return [{"set": self.held_out.name, **line} for line in describe_episodes(self.episodes, tokenizer)]


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
