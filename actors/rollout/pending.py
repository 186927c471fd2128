"""Samples that engines are still making."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.rollout.calls import Sampling, outcome_of
from actors.rollout.messages import Generated
from actors.rollout.routes import Routes, split_routes
from actors.rollout.sample import Sample, VersionSpan
from rl_backend.contracts import RLBackendError


@dataclass(frozen=True)
class _Call:
    reference: Any
    engine: int
    prompts: range


class PendingSamples:
    """Samples that are being made; :meth:`result` waits for them.

    Args:
        prompts: of the whole call.
        n: samples of each.
        note: told an engine's number and the error of its call.
        sampling: knows how long an engine may take.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], n: int, note: Callable[[int, Any], None], sampling: Sampling
    ) -> None:
        self._note = note
        self._sampling = sampling
        self._prompts = prompts
        self._n = n
        self._calls: dict[Any, _Call] = {}
        self._samples: dict[int, list[Sample]] = {}
        self._error: RLBackendError | None = None

    def add(self, reference: Any, engine: int, prompts: range) -> None:
        """One engine's share."""
        self._calls[reference] = _Call(reference, engine, prompts)

    def done(self) -> bool:
        """Whether :meth:`result` would return, or raise, at once."""
        if self._error is not None or not self._calls:
            return True
        ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return len(ready) == len(self._calls)

    def result(self, timeout: float | None = None) -> list[Sample]:
        """The samples, in the caller's order; raises what ``RolloutGroup.generate`` raises, as soon as it is known."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._error is not None:
            raise self._error
        while self._calls:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            engines = {reference: call.engine for reference, call in self._calls.items()}
            reference, overdue = self._sampling.wait_for_first(engines, left)
            call = self._calls.pop(reference)
            outcome = overdue or outcome_of(call.reference, f"engine {call.engine}")
            if isinstance(outcome, RLBackendError):
                self._error = outcome
                self._note(call.engine, outcome)
                raise outcome
            self._take(call, outcome)
        return [sample for prompt in range(len(self._prompts)) for sample in self._samples[prompt]]

    def _take(self, call: _Call, generated: Generated) -> None:
        flat = [response for request in generated.responses for response in request]
        prompts = [self._prompts[prompt] for prompt in call.prompts for _ in range(self._n)]
        lengths = [len(prompt) + len(response.token_ids) for prompt, response in zip(prompts, flat, strict=True)]
        routes: list[Routes] | list[None] = (
            [None] * len(flat) if generated.routes is None else split_routes(generated.routes, lengths, generated.version)
        )
        for position, prompt in enumerate(call.prompts):
            own = slice(position * self._n, (position + 1) * self._n)
            self._samples[prompt] = [
                Sample(
                    prompt_index=prompt,
                    sample_index=index,
                    prompt_ids=list(self._prompts[prompt]),
                    response_ids=response.token_ids,
                    log_probs=response.log_probs,
                    finish_reason=response.finish_reason,
                    version_spans=(VersionSpan(generated.version, len(response.token_ids)),),
                    engine=call.engine,
                    routes=of_sample,
                )
                for index, (response, of_sample) in enumerate(zip(flat[own], routes[own], strict=True))
            ]
