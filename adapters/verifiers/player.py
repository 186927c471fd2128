"""Plays environments of verifiers: a process of theirs, an endpoint of ours, and the record on our side."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from adapters.verifiers.endpoint import Session, TokenEndpoint
from adapters.verifiers.process import VerifiersProcess, VerifiersSettings
from rl_backend.contracts import BatchError, ConfigError, EpisodeFailedError
from rl_backend.data.rewards.worker_pool import EventLoop
from rl_backend.environment.protocol import Result, Sampler, Stop

# Limits of verifiers' own, as its traces name them, and those of an episode. Any other condition is the environment's.
STOPS: Mapping[str, Stop] = {
    "max_turns": "turns",
    "max_input_tokens": "tokens",
    "max_output_tokens": "tokens",
    "max_total_tokens": "tokens",
    "compaction_failed": "context",
    "setup_timeout": "timeout",
    "agent_timeout": "timeout",
    "finalize_timeout": "timeout",
    "scoring_timeout": "timeout",
}


class VerifiersPlayer:
    """A :class:`~rl_backend.environment.protocol.Player` of an environment of verifiers 0.4.

    What our sampler recorded is trained on. An episode of which verifiers reports other tokens is an error, and an
    environment of several agents is refused. It serves one event loop after the other.

    Args:
        context_tokens: of the engines.
    """

    def __init__(self, settings: VerifiersSettings, *, context_tokens: int) -> None:
        self._settings = settings
        self._endpoint = TokenEndpoint(context_tokens, settings.stop_token_ids)
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._opening = threading.Lock()
        self._loop: EventLoop | None = None
        self._child: VerifiersProcess | None = None

    @property
    def tasks(self) -> Sequence[str]:
        """Names of the environment's tasks; a row names one by ``{"task": index}``. Opens the player."""
        return self.open()._opened().tasks

    def open(self) -> Self:
        with self._opening:
            if self._child is None:
                self._loop = EventLoop()
                try:
                    self._loop.run(self._endpoint.open()).result()
                    self._child = VerifiersProcess(self._settings, self._endpoint.url, self._settle, self._lose)
                except BaseException:
                    self._end()
                    raise
        return self

    def close(self) -> None:
        with self._opening:
            self._end()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        child = (await asyncio.to_thread(self.open))._opened()
        task = row.get("task")
        if not isinstance(task, int) or not 0 <= task < len(child.tasks):
            problem = f"expected the number of a task of the environment, 0 to {len(child.tasks) - 1}"
            raise ConfigError.of("task", task, problem)
        number = next(self._numbers)
        answer = self._waiting[number] = Future()
        with self._endpoint.session(sampler) as (token, session):
            try:
                child.send({"play": number, "task": task, "token": token})
                played = await asyncio.wrap_future(answer)
            except asyncio.CancelledError:
                child.send({"cancel": number})
                raise
            finally:
                del self._waiting[number]
        return _result(played, session)

    def _opened(self) -> VerifiersProcess:
        assert self._child is not None  # see open
        return self._child

    def _end(self) -> None:
        child, self._child, loop, self._loop = self._child, None, self._loop, None
        if child is not None:
            child.end()
        if loop is not None:
            loop.run(self._endpoint.close()).result()
            loop.close()

    def _settle(self, message: dict[str, Any]) -> None:
        waiting = self._waiting.get(message["played"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _lose(self) -> None:
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(EpisodeFailedError("the process of verifiers ended; see its output above"))


def _result(played: Mapping[str, Any], session: Session) -> Result:
    ended = session.failed or session.ended
    if ended is not None:
        raise ended
    if played["errors"]:
        return Result(stop="error", error="; ".join(played["errors"]))
    traces = played["traces"]
    if len(traces) != 1:
        agents = ", ".join(trace["agent"] for trace in traces)
        raise BatchError(
            f"an episode of the agents {agents}; only environments in which one agent runs once can be trained on"
        )
    (trace,) = traces
    _compare(trace["branches"], session)
    stop = STOPS.get(trace["stop"] or "", "done")
    error = "" if stop == "done" else f"verifiers' own limit: {trace['stop']}"
    metrics = {name: float(value) for name, value in trace["metrics"].items()}
    return Result(float(trace["reward"]), metrics, stop, error)


def _compare(branches: Sequence[Mapping[str, Any]], session: Session) -> None:
    # What is trained on is our record: it must be what the environment rewarded.
    for prompt, turn in session.turns:
        ids, end = [*prompt, *turn.token_ids], len(prompt) + len(turn.token_ids)
        if not any(branch["token_ids"][:end] == ids and all(branch["sampled"][len(prompt) : end]) for branch in branches):
            raise BatchError(
                f"verifiers reports no branch with the {len(turn.token_ids)} tokens that were sampled after {len(prompt)}"
            )
