"""Messages between a rollout group and its engines: requests and responses, samples and their routes, adapters."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from actors.rollout.config import MASKS, SamplingConfig
from rl_backend.contracts import BatchError, RolloutError, SamplingMask, TokenSequence, WeightVersionError, route_fields

STOPPED_LOOKS = 6
"""In a row, at heartbeats: 3 s in which a process was stopped. Debuggers stop one for moments, too."""

type WakePart = Literal["all", "weights", "kv_cache"]
type EngineState = Literal["serving", "paused", "dirty", "asleep"]
type FinishReason = Literal["stop", "length", "abort"]
type ExpertIds = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says about itself.

    Attributes:
        cores: numbers of the cores that it runs on; empty on CUDA.
        device_ids: UUIDs of its CUDA devices; empty on a CPU.
        version: of the weights served; ``UNVERSIONED`` before the first push.
        moe_layers: with ``RolloutConfig.return_routed_experts``, the numbers of the layers that have experts.
        started: when process ``pid`` did, in clock ticks after boot.
        room: requests that it runs at one time, vLLM's ``max_num_seqs``.
    """

    name: str
    pid: int
    node_id: str
    node_ip: str
    host: str
    cores: tuple[int, ...]
    device: str
    dtype: str
    workers: int
    device_ids: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    version: int
    state: EngineState
    moe_layers: tuple[int, ...] = ()
    started: str = ""
    room: int = 1


IN_MEMORY = "memory://"
"""Begins the path of an adapter that is in the memory of vLLM's workers."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of a LoRA tenant's adapter in the engines; ``number`` is vLLM's for it."""

    tenant: str
    version: int
    number: int
    rank: int

    @property
    def name(self) -> str:
        """What vLLM's prefix cache tells versions apart by."""
        # With the number: a name that came back would find keys and values of the adapter before.
        return f"{self.tenant}@{self.version}#{self.number}"

    @property
    def path(self) -> str:
        """Where vLLM is told to load it from."""
        return f"{IN_MEMORY}{self.name}"


class PushedAdapter(NamedTuple):
    """What an engine needs to serve an adapter.

    Attributes:
        factors: :class:`~actors.wire.factors.SharedFactors`; or :class:`~actors.wire.factors.PackedFactors` in Ray's
            object store; or a directory in peft's format. In memory the scale is multiplied into B.
        digest: of the factors, where they come from.
    """

    adapter: AdapterVersion
    factors: Any
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for.

    Attributes:
        sampling: how; its ``n`` is not read.
        require_version: oldest version of the adapter, or without one of the weights.
        pausable: other weights may be loaded in the middle of it. Else they wait for its end. Engines decide it.
        waits: for an engine that takes weights or sleeps, as a turn of an episode does. There a call's request is an error.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingConfig
    seed: int | None = None
    adapter: AdapterVersion | None = None
    require_version: int | None = None
    pausable: bool = False
    waits: bool = True


def prompt_problem(prompt: Sequence[int], max_model_len: int, vocab_size: int) -> str:
    """Why no engine could answer a prompt, as a predicate; empty where one could."""
    if not 0 < len(prompt) < max_model_len:
        return (
            f"has {len(prompt)} tokens; expected 1 to {max_model_len - 1} "
            f"(max_model_len={max_model_len} holds prompt and response)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"has token ids from {min(prompt)} to {max(prompt)}; expected 0 to {vocab_size - 1}"
    return ""


class VersionSpan(NamedTuple):
    version: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Response:
    """One response as the engine returns it.

    Attributes:
        log_probs: of each token; empty when not asked for.
        finish_reason: ``abort`` where it was given up; what had been sampled by then is here.
        spans: versions of the weights, or of the adapter, that sampled its tokens.
        cached_tokens: of the prompt, which were not computed.
        routes: (prompt and response tokens - 1, MoE layers, top_k), where engines return them and a token was sampled.
        sampling_mask: where engines return them and a token was sampled.
        engine: number of the engine.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...] = ()
    cached_tokens: int = 0
    routes: ExpertIds | None = field(default=None, compare=False)
    sampling_mask: SamplingMask | None = field(default=None, compare=False)
    engine: int = field(default=0, compare=False)

    @classmethod
    def of(cls, completion: Any, name: str, **facts: Any) -> Self:
        """From vLLM's ``CompletionOutput`` of the engine ``name``, and ``facts`` that it does not have.

        Raises:
            RolloutError: a log-prob is NaN or infinite, which that of a sampled token cannot be.
        """
        flat = completion.logprobs
        log_probs = [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]
        if not all(map(math.isfinite, log_probs)):
            place = next(place for place, value in enumerate(log_probs) if not math.isfinite(value))
            raise RolloutError(
                f"{name}: response token {place} was sampled with log-prob {log_probs[place]}: the engine computes wrong "
                "numbers. Where the weights are right, its kernels for this model are wrong in this dtype; try another one",
                engine=name,
            )
        # vLLM has more reasons; each but these two is a length that was reached.
        said = completion.finish_reason
        reason: FinishReason = said if said in ("stop", "abort") else "length"
        return cls(list(completion.token_ids), log_probs, reason, **facts)


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


def routes_of(completion: Any, length: int, moe_layers: Sequence[int], name: str) -> ExpertIds:
    """Routes of one response, (length - 1, MoE layers, top_k).

    Args:
        completion: vLLM's, which has a row for every hidden layer, dense ones too.
        length: tokens of prompt and response.

    Raises:
        RolloutError: the engine ``name`` returned none, or not a row for every token but the last.
    """
    routes = completion.routed_experts
    if routes is None or len(routes) != length - 1:
        found = "no routes" if routes is None else f"routes of {len(routes)} tokens"
        raise RolloutError(
            f"{name}: vLLM returned {found} for {length} tokens of prompt and response; expected {length - 1}", engine=name
        )
    return np.ascontiguousarray(routes[:, list(moe_layers)])


def mask_of(completion: Any, name: str) -> SamplingMask:
    """The mask of one response, from vLLM's ``CompletionOutput``.

    Raises:
        RolloutError: the engine ``name`` returned none, not a row for every token, or one without its token.
    """
    tokens, mask = list(completion.token_ids), completion.sampling_mask
    if mask is None or len(mask.token_ids) != len(tokens):
        found = "no mask" if mask is None else f"a mask of {len(mask.token_ids)} tokens"
        raise RolloutError(f"{name}: vLLM returned {found} for a response of {len(tokens)}", engine=name)
    rows = np.full((len(tokens), max(map(len, mask.token_ids))), -1, dtype=np.int32)
    for place, (token, words) in enumerate(zip(tokens, mask.token_ids, strict=True)):
        if token not in words:
            raise RolloutError(
                f"{name}: response token {place} is {token}, and its mask of {len(words)} words has no such word: the mask "
                f"is of another token; leave engine_args[{MASKS!r}] out",
                engine=name,
            )
        rows[place, : len(words)] = sorted(words)
    return rows


@dataclass(frozen=True, slots=True)
class Sample:
    """One response.

    Attributes:
        prompt_ids, response_ids: token ids; the response ends with the stop token or string if there was one.
        log_probs: of each response token; empty when not asked for.
        finish_reason: ``stop`` for a stop token or string, ``length`` for ``max_new_tokens`` or ``max_model_len``.
        version_spans: in order, and adding up to the response's tokens.
        routes: with ``RolloutConfig.return_routed_experts``, the experts of its tokens.
        sampling_mask: with vLLM's ``return_sampling_mask``, the words that they were sampled from.
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
    sampling_mask: SamplingMask | None = field(default=None, compare=False)

    @property
    def weight_versions(self) -> list[int]:
        return [span.version for span in self.version_spans for _ in range(span.tokens)]

    def with_routes(self, sequence: TokenSequence) -> TokenSequence:
        """Adds the sample's routes to its sequence, as :mod:`rl_backend.contracts.replay` has them.

        They are for the layers with experts alone: a replay needs ``meta["routed_experts_layers"] = "moe"``. The last token
        has none. The weight versions of routes and sample go along, and a replay refuses them where they differ.

        Raises:
            BatchError: the sample has no routes, or ``sequence`` is not its prompt and response.
            WeightVersionError: the response was made by weights of several versions, and its routes by one.
        """
        if self.routes is None or len(sequence) != len(self.routes.experts) + 1:
            tokens = 0 if self.routes is None else len(self.routes.experts) + 1
            raise BatchError(
                f"a sequence of {len(sequence)} tokens, and a sample with routes for {tokens}: give the sample's own prompt "
                "and response, of engines with RolloutConfig(return_routed_experts=True)"
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
