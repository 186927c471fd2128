"""Metrics of a step's episodes, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.collect.episodes import EpisodeBatch
from actors.collect.sample_metrics import episode_metrics
from rl_backend.environment import Episode, Turn
from tests.support.episodes import episode, segment

OWN: dict[str, Any] = {"episode/turns": 6.0}


def played(turns: tuple[int, ...], reward: float, stop: Any = "done", segments: int = 1, **metrics: float) -> Episode:
    """Turns of so many tokens."""
    made = [Turn(None, [1] * tokens, [0.0] * tokens, "stop") for tokens in turns]
    parts = [segment([("given", [1]), ("sampled", [2])])] * segments
    return replace(episode(*parts), turns=made, reward=reward, stop=stop, metrics=metrics)


def test_metrics_of_episodes_are_means_largest_ones_and_shares_of_sums() -> None:
    groups = [
        [
            played((3, 4), 1.0, tool_calls=1, failed_tool_calls=1, prompt_tokens=10, cached_tokens=2, seconds=4.0, won=1),
            played(
                (1,), 0.0, "turns", 2, tool_calls=4, prompt_tokens=30, cached_tokens=3, environment_seconds=1.0, seconds=1.0
            ),
        ],
        [played((2, 2, 2), 1.0, won=0, **OWN), played((6,), 1.0, tool_calls=3, failed_tool_calls=1)],
        [played((1,), 5.0, "length", 3)],
    ]
    dropped = [played((9,), 7.0, "error", won=1), played((), 7.0, "timeout"), played((), 0.0, "error")]
    found = episode_metrics(groups, dropped)
    assert found == pytest.approx(
        {
            "reward": 8 / 5,
            "reward_std": ((0.6**2 * 3 + 1.6**2 + 3.4**2) / 5) ** 0.5,
            "turns": 8 / 5,
            "turns_max": 3,
            "segments": 8 / 5,
            "response_tokens": (7 + 1 + 6 + 6 + 1) / 5,
            "response_tokens_max": 7,
            "tool_calls": 8 / 5,
            "tool_calls_failed": 2 / 8,
            "prompt_tokens_cached": 5 / 40,
            "environment_share": 1 / 5,
            "equal_groups": 1 / 2,
            "episodes_cut_off": 2 / 5,
            "stop/done": 3 / 8,
            "stop/error": 2 / 8,
            "stop/length": 1 / 8,
            "stop/timeout": 1 / 8,
            "stop/turns": 1 / 8,
            "episodes_failed": 3 / 8,
            "episode/turns": 6.0,
            "episode/won": 0.5,
        }
    )
    assert list(found)[-2:] == ["episode/turns", "episode/won"]


def test_what_no_episode_has_is_no_metric() -> None:
    found = episode_metrics([[played((2,), 1.0)], [played((2,), 2.0)]])
    assert not {"equal_groups", "tool_calls_failed", "prompt_tokens_cached", "environment_share"} & set(found)
    assert (found["tool_calls"], found["episodes_failed"], found["stop/done"], found["reward_std"]) == (0, 0, 1, 0.5)


def test_batches_share_no_lists() -> None:
    first, second = (EpisodeBatch([], [], [], [], {}) for _ in range(2))
    first.dropped.append(played((1,), 0.0))
    first.failures.append("x")
    assert second.dropped == [] and second.failures == []
