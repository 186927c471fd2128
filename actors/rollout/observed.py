"""What an engine reports about its sampling: an event of the trace, and Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actors.cluster import prometheus
from rl_backend.trace import span

if TYPE_CHECKING:
    from actors.rollout.messages import Request, Response


@contextmanager
def observed(
    engine: int, version: int, requests: Sequence[Request]
) -> Iterator[Callable[[Sequence[Sequence[Response]]], None]]:
    """Reports the sampling that its body does; hand the responses to what it yields."""
    started = time.perf_counter()
    with span("generate", "rollout", weight_version=version, requests=len(requests)) as event:

        def report(responses: Sequence[Sequence[Response]]) -> None:
            count = sum(map(len, responses))
            tokens = sum(len(response.token_ids) for request in responses for response in request)
            prompt_tokens = sum(len(request.prompt_ids) for request in requests)
            event.add(responses=count, prompt_tokens=prompt_tokens, response_tokens=tokens)
            prometheus.count("rl_backend_rollout_responses_total", count, engine=str(engine))
            prometheus.count("rl_backend_rollout_tokens_total", tokens, engine=str(engine))
            prometheus.count("rl_backend_rollout_seconds_total", time.perf_counter() - started, engine=str(engine))

        yield report
