"""Engines in memory: what they sample follows from prompt and seed alone, whoever else is being served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_backend.environment import Generation


@dataclass
class RandomSource:
    """Samples random ids.

    Attributes:
        context_tokens, vocab_size: see :class:`~rl_backend.environment.TokenSource`.
        version: of the weights.
        routed: whether generations have routes: (row, version) of each token.
        delay: seconds of a generation.
        prompts: that were asked for, in order.
        most_at_once: generations.
    """

    context_tokens: int = 64
    vocab_size: int = 50
    version: int = 0
    routed: bool = False
    delay: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        self.prompts.append(list(token_ids))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self.delay)
        finally:
            self._now -= 1
        generator = random.Random(f"{seed} {list(token_ids)}")
        sampled: list[int] = []
        while len(sampled) < max_tokens and not (sampled and sampled[-1] in stop_token_ids):
            sampled.append(generator.randrange(self.vocab_size))
        stopped = sampled[-1] in stop_token_ids
        return generation(
            sampled, finish="stop" if stopped else "length", version=self.version, routes=self._routes(token_ids, sampled)
        )

    def _routes(self, prompt: Sequence[int], sampled: Sequence[int]) -> Any:
        rows = len(prompt) + len(sampled) - 1
        return np.array([[[row, self.version]] for row in range(rows)], dtype=np.uint8) if self.routed else None


@dataclass
class WrittenSource:
    """Answers with what ``write`` returns for a prompt: ids, whose last may be a stop token."""

    write: Callable[[list[int]], Sequence[int]]
    context_tokens: int = 4096
    vocab_size: int = 100_000
    prompts: list[list[int]] = field(default_factory=list)

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        del seed
        self.prompts.append(list(token_ids))
        await asyncio.sleep(0)
        sampled = list(self.write(list(token_ids)))[:max_tokens]
        return generation(sampled, finish="stop" if sampled[-1] in stop_token_ids else "length")


def generation(
    token_ids: Sequence[int], *, finish: Any = "stop", version: int = 0, routes: Any = None, mask: Any = None
) -> Generation:
    """With log-probs that tell tokens apart."""
    log_probs, versions = [-(each + 1) / 100 for each in token_ids], [version] * len(token_ids)
    return Generation(list(token_ids), log_probs, finish, versions, routes, sampling_mask=mask)
