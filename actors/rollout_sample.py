"""What rollout engines return."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash


class VersionSpan(NamedTuple):
    """``tokens`` consecutive response tokens that were computed with weights of ``version``."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response.

    Attributes:
        prompt_index, sample_index: which prompt of the call, and which of its ``n`` responses.
        prompt_ids, response_ids: token ids; the response ends with the stop token if there was one.
        log_probs: of each response token; empty when not asked for.
        finish_reason: ``stop`` for a stop token, ``length`` for ``max_new_tokens`` or the engine's ``max_model_len``.
        version_spans: in order, and adding up to the response's tokens.
        engine: number of the engine in its group.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    version_spans: tuple[VersionSpan, ...]
    engine: int

    @property
    def weight_versions(self) -> list[int]:
        """The weight version of every response token."""
        return [span.version for span in self.version_spans for _ in range(span.tokens)]


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """Seed of one request, in [0, 2^63): xxh3-64 of the four whole numbers. Independent of engines and batching."""
    return int(xxhash.xxh3_64_intdigest(struct.pack("<4q", run_seed, step, prompt, sample))) >> 1


def sample_seeds(run_seed: int, step: int, num_prompts: int, n: int) -> list[int]:
    """Seeds of a whole call, prompt by prompt, ``n`` samples each."""
    return [sample_seed(run_seed, step, prompt, sample) for prompt in range(num_prompts) for sample in range(n)]
