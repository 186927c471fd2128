"""Messages between a rollout group and its engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from actors.rollout.config import SamplingConfig
from actors.rollout.sample import ExpertIds, VersionSpan
from rl_backend.contracts import RolloutError

type EngineState = Literal["serving", "paused", "dirty", "asleep"]


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says about itself.

    Attributes:
        workers: processes that hold a part of the model.
        node_id: Ray's, of the node that it runs on.
        host: equal for processes that share memory.
        cores: numbers of the cores that it runs on; empty on CUDA.
        device_ids: of CUDA devices, their UUIDs; empty on a CPU.
        version: of the weights served; ``UNVERSIONED`` before the first push.
        moe_layers: with ``RolloutConfig.return_routed_experts``, the numbers of the layers that have experts.
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


IN_MEMORY = "memory://"
"""Begins the path of an adapter that is in the memory of vLLM's workers."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One version of a tenant's adapter in the engines. Neither name nor number is ever used again.

    Attributes:
        tenant: name of the LoRA tenant.
        version: the tenant's weight version.
        number: by which vLLM knows it.
        rank: of its factors.
    """

    tenant: str
    version: int
    number: int
    rank: int

    @property
    def name(self) -> str:
        """What the prefix cache tells versions apart by."""
        return f"{self.tenant}@{self.version}#{self.number}"

    @property
    def path(self) -> str:
        """Where vLLM is told to load it from."""
        return f"{IN_MEMORY}{self.name}"


class PushedAdapter(NamedTuple):
    """What an engine needs to serve an adapter, as :meth:`~actors.rollout.engine.adapters.AdapterStore.push` takes it.

    Attributes:
        factors: :class:`~actors.wire.factors.SharedFactors`, or a reference to a
            :class:`~actors.wire.factors.PackedFactors` in Ray's object store, the scale multiplied into B; or a directory in
            peft's format.
        digest: of the factors, where they come from.
    """

    adapter: AdapterVersion
    factors: Any
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt with ``n`` responses; ``seed`` needs ``n`` = 1."""

    prompt_ids: Sequence[int]
    n: int
    seed: int | None


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


@dataclass(frozen=True, slots=True)
class Response:
    """One response as the engine returns it."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]

    @classmethod
    def of(cls, completion: Any, engine: str) -> Self:
        """From vLLM's ``CompletionOutput``.

        Args:
            engine: for messages.

        Raises:
            RolloutError: a log-prob is NaN or infinite, which that of a sampled token cannot be.
        """
        flat = completion.logprobs
        log_probs = [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]
        if not all(map(math.isfinite, log_probs)):
            place = next(place for place, value in enumerate(log_probs) if not math.isfinite(value))
            raise RolloutError(
                f"{engine}: response token {place} was sampled with log-prob {log_probs[place]}: the engine computes wrong "
                "numbers. Where the weights are right, its kernels for this model are wrong in this dtype; try another one",
                engine=engine,
            )
        return cls(list(completion.token_ids), log_probs, "stop" if completion.finish_reason == "stop" else "length")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that is asked for.

    Attributes:
        key: of the asking process; its answer has it.
        request, sampling, adapter, require_version: of one response, as
            :meth:`~actors.rollout.engine.engine.RolloutEngine.generate` takes them.
    """

    key: int
    request: Request
    sampling: SamplingConfig
    adapter: AdapterVersion | None = None
    require_version: int | None = None


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """What came of a turn.

    Attributes:
        finish: ``abort`` where it was given up; what had been sampled by then is here.
        spans: versions of the weights, or of the adapter, that sampled its tokens.
        cached_tokens: of the prompt, which were not computed.
        routes: (prompt and response tokens - 1, MoE layers, top_k) where engines return them and a token was sampled.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length", "abort"]
    spans: tuple[VersionSpan, ...]
    cached_tokens: int
    routes: ExpertIds | None


class Generated(NamedTuple):
    """What one call of an engine returns.

    Attributes:
        versions: of the weights, or of the adapter, of each request.
        responses: of each request.
        routes: of all responses, see :func:`~actors.rollout.sample.pack_routes`; None where none are asked for.
    """

    versions: list[int]
    responses: list[list[Response]]
    routes: ExpertIds | None
