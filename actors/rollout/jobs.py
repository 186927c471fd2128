"""Requests on their way through an engine, and the two sides of its step loop: what steps, and what knows the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from actors.rollout.config import SamplingConfig
from actors.rollout.messages import AdapterVersion, Request
from actors.rollout.sample import VersionSpan


@dataclass(frozen=True, slots=True)
class Job:
    """A request for one response.

    Attributes:
        request: its ``n`` is 1.
        sampling: how; ``n`` is not read.
        adapter: what works beside the weights.
        require_version: of the weights, or of the adapter, at least.
        pausable: other weights may be loaded in the middle of it. Else they wait for its end.
    """

    request: Request
    sampling: SamplingConfig
    adapter: AdapterVersion | None = None
    require_version: int | None = None
    pausable: bool = False


class Completion(NamedTuple):
    """What a :class:`Stepper` has of a request.

    Attributes:
        output: vLLM's ``CompletionOutput``; its ``finish_reason`` is ``abort`` where the request was given up.
        cached_tokens: of the prompt, which were not computed.
    """

    output: Any
    cached_tokens: int


class Finished(NamedTuple):
    """A request that has ended.

    Attributes:
        spans: versions of the weights, or of the adapter, that sampled its tokens.
    """

    completion: Completion
    spans: tuple[VersionSpan, ...]


class Stepper(Protocol):
    """What runs requests step by step: vLLM, or a stand-in of tests. Keys are the caller's."""

    @property
    def room(self) -> int:
        """Requests that run at one time."""
        ...

    def add(self, key: int, job: Job) -> None:
        """Begins a request; raises what is wrong with it, and is then as before."""
        ...

    def step(self) -> Iterable[tuple[int, Completion]]:
        """One more token of every request; those that have ended."""
        ...

    def give_up(self, key: int) -> Completion:
        """Ends a request; what there is of it."""
        ...

    def sampled(self, key: int) -> int:
        """Tokens that a request has sampled."""
        ...

    def forget(self) -> None:
        """Drops all keys and values. Requests keep their tokens, for which the next step computes keys and values anew."""
        ...


class Host(Protocol):
    """What knows which weights are served. Its methods are called on the loop's thread."""

    def admit(self, job: Job) -> bool:
        """Whether a request may begin now; raises where it never may."""
        ...

    def version_for(self, job: Job) -> int:
        """That its next token is sampled with."""
        ...

    def ended(self, job: Job) -> None:
        """A request has left, whatever came of it."""
        ...

    def failed(self, error: Exception) -> Exception:
        """What to tell those who wait when a step has raised ``error``."""
        ...
