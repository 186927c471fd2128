"""Episodes made by hand, for tests of what trains on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_backend.environment import Episode, Segment
from rl_backend.environment.protocol import Stop


def segment(
    parts: Sequence[tuple[str, Sequence[int]]],
    *,
    rewards: Sequence[float] = (),
    version: int = 1,
    routes: bool = False,
) -> Segment:
    """A segment of ``("given", ids)`` and ``("sampled", ids)``; its log-probs are -id / 10.

    Args:
        rewards: of the sampled parts in order, each at its last token.
    """
    ids: list[int] = []
    sampled: list[bool] = []
    placed: list[float] = []
    left = list(rewards)
    for kind, tokens in parts:
        ids += tokens
        sampled += [kind == "sampled"] * len(tokens)
        reward = left.pop(0) if kind == "sampled" and left else 0.0
        placed += [0.0] * (len(tokens) - 1) + [reward]
    return Segment(
        ids,
        sampled,
        [-token / 10 if chosen else 0.0 for token, chosen in zip(ids, sampled, strict=True)],
        [version if chosen else -1 for chosen in sampled],
        placed,
        np.arange((len(ids) - 1) * 2, dtype=np.uint8).reshape(-1, 2, 1) % 4 if routes else None,
    )


def episode(*segments: Segment, reward: float | None = None, stop: Stop = "done") -> Episode:
    """Its reward is the sum of its tokens', if not given."""
    total = sum(sum(each.rewards) for each in segments) if reward is None else reward
    return Episode(segments, total, {}, (), stop)
