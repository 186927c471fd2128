"""Samples, their seeds, and the routes that come with them from vLLM to a training sequence."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rl_backend.contracts import BatchError, RolloutError, TokenSequence, WeightVersionError, route_fields

type ExpertIds = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The experts of one sample's tokens.

    Attributes:
        experts: (L - 1, MoE layers, top_k) ids, of the smallest unsigned type that vLLM has for them, for prompt and
            response together: no forward pass has seen the last token. The second axis counts the layers that have experts
            alone, first to last (``EngineInfo.moe_layers`` has their numbers in the model); the experts of a row are in the
            router's order. A read-only view of what the engine put into Ray's object store.
        weight_version: of the weights whose routers chose, for every row. A push empties the engine's prefix cache, so a
            prompt is never answered with routes of older weights.
    """

    experts: ExpertIds
    weight_version: int


def pack_routes(completions: Sequence[Any], lengths: Sequence[int], moe_layers: Sequence[int], engine: str) -> ExpertIds:
    """Routes of several samples end to end, (sum of the lengths - 1, MoE layers, top_k), so that they travel as one array.

    Args:
        completions: vLLM's, which have a row for every hidden layer, dense ones too.
        lengths: tokens of prompt and response of each.
        moe_layers: numbers of the layers with experts.
        engine: for messages.

    Raises:
        RolloutError: vLLM returned none, or not a row for every token but the last.
    """
    parts = []
    for completion, length in zip(completions, lengths, strict=True):
        routes = completion.routed_experts
        if routes is None or len(routes) != length - 1:
            found = "no routes" if routes is None else f"routes of {len(routes)} tokens"
            raise RolloutError(
                f"{engine}: vLLM returned {found} for {length} tokens of prompt and response; expected {length - 1}",
                engine=engine,
            )
        parts.append(routes[:, list(moe_layers)])
    return np.concatenate(parts)


def split_routes(packed: ExpertIds, lengths: Sequence[int], versions: Sequence[int]) -> list[Routes]:
    """Views of :func:`pack_routes`' array, one for each sample, with the version of the weights that it was made with."""
    ends = np.cumsum([length - 1 for length in lengths])
    return [Routes(part, version) for part, version in zip(np.split(packed, ends[:-1]), versions, strict=True)]


class VersionSpan(NamedTuple):
    """``tokens`` consecutive response tokens that were computed with weights of ``version``."""

    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One response.

    Attributes:
        prompt_index, sample_index: which prompt of the call, and which of its ``n`` responses.
        prompt_ids, response_ids: token ids; the response ends with the stop token or string if there was one.
        log_probs: of each response token; empty when not asked for.
        finish_reason: ``stop`` for a stop token or string, ``length`` for ``max_new_tokens`` or ``max_model_len``.
        version_spans: in order, and adding up to the response's tokens.
        engine: number of the engine in its group.
        routes: with ``RolloutConfig.return_routed_experts``, the experts of its tokens.
    """

    prompt_index: int
    sample_index: int
    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    version_spans: tuple[VersionSpan, ...]
    engine: int
    routes: Routes | None = field(default=None, compare=False)

    @property
    def weight_versions(self) -> list[int]:
        """The weight version of every response token."""
        return [span.version for span in self.version_spans for _ in range(span.tokens)]

    def with_routes(self, sequence: TokenSequence) -> TokenSequence:
        """Adds the sample's routes to its sequence, as :mod:`rl_backend.contracts.replay` has them.

        They are for the layers with experts alone: a replay needs ``meta["routed_experts_layers"] = "moe"``. The last token
        has none. The weight versions of routes and sample go along, and a replay refuses them where they differ.

        Raises:
            BatchError: the sample has no routes, or ``sequence`` is not its prompt and response.
            WeightVersionError: the response was made by weights of several versions, and its routes by one.
        """
        if self.routes is None:
            raise BatchError("the sample has no routes; ask for them with RolloutConfig(return_routed_experts=True)")
        if len(sequence) != len(self.routes.experts) + 1:
            raise BatchError(
                f"a sequence of {len(sequence)} tokens; the sample's routes are for the first {len(self.routes.experts)} of "
                f"{len(self.routes.experts) + 1}: give its own prompt and response"
            )
        versions = sorted({span.version for span in self.version_spans})
        if len(versions) > 1:
            raise WeightVersionError(
                f"the sample was made with weights of versions {versions}, its routes with {self.routes.weight_version}; "
                "replay needs samples of one version",
                versions=versions,
            )
        # The array lies in Ray's object store, which nobody may write to and torch knows no read-only tensors.
        experts = torch.from_numpy(self.routes.experts.copy())
        computed, sampled = (torch.tensor(version) for version in (self.routes.weight_version, versions[0]))
        return sequence.with_fields(
            route_fields(experts, len(sequence)), {"routed_experts_version": computed, "weight_version": sampled}
        )


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """Seed of one request, in [0, 2^63): xxh3-64 of the four whole numbers. Independent of engines and batching."""
    return int(xxhash.xxh3_64_intdigest(struct.pack("<4q", run_seed, step, prompt, sample))) >> 1


def sample_seeds(run_seed: int, step: int, num_prompts: int, n: int) -> list[int]:
    """Seeds of a whole call, prompt by prompt, ``n`` samples each."""
    return [sample_seed(run_seed, step, prompt, sample) for prompt in range(num_prompts) for sample in range(n)]
