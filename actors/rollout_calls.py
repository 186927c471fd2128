"""Calling Ray actors that run engines: every call answers, refuses or is found dead."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors import prometheus
from rl_backend.contracts import EngineDeadError, RLBackendError, RolloutError


def outcome_of(reference: Any, engine: str) -> Any:
    """The result of a finished call, or, returned and not raised, the error that it ended with.

    A dead actor becomes an :class:`~rl_backend.contracts.EngineDeadError`.
    """
    try:
        return ray.get(reference, timeout=0)
    except RayActorError as error:
        return EngineDeadError(f"{engine} is dead: its process ended ({_reason(error)}); restart it", engine=engine)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RLBackendError):
            return cause
        return RolloutError(f"{engine} failed with {type(cause).__name__}: {cause}\n{error}", engine=engine)
    except RayError as error:
        return EngineDeadError(f"{engine} is dead: {type(error).__name__}: {_reason(error)}; restart it", engine=engine)


class Sampling:
    """Calls that sample, by engine. An engine serves one call at a time, so that later ones wait behind them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, list[Any]] = {}

    def add(self, engine: int, reference: Any) -> None:
        """A call that was just started."""
        with self._lock:
            calls = self._calls.get(engine, [])
            _, running = ray.wait(calls, num_returns=len(calls), timeout=0, fetch_local=False) if calls else ([], [])
            self._keep(engine, [*running, reference])

    def wait(self, engines: Collection[int]) -> None:
        """Waits as long as it takes; the calls of an engine that dies end with it."""
        with self._lock:
            waiting = [reference for engine in engines for reference in self._calls.get(engine, [])]
        if not waiting:
            return
        ray.wait(waiting, num_returns=len(waiting), fetch_local=False)
        ended = set(waiting)
        with self._lock:
            for engine in engines:
                self._keep(engine, [call for call in self._calls.get(engine, []) if call not in ended])

    def _keep(self, engine: int, calls: list[Any]) -> None:
        self._calls[engine] = calls
        prometheus.set_gauge("rl_backend_rollout_queue", len(calls), engine=str(engine))


def collect(calls: Mapping[int, Any], names: Mapping[int, str], timeout: float) -> dict[int, Any]:
    """Waits until every call has ended and returns each one's outcome (see :func:`outcome_of`).

    An engine that has not answered after ``timeout`` seconds counts as dead.
    """
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout) if calls else ([], [])
    ended = set(done)
    return {
        engine: outcome_of(reference, names[engine])
        if reference in ended
        else EngineDeadError(f"{names[engine]} did not answer for {timeout:g} s; restart it", engine=names[engine])
        for engine, reference in calls.items()
    }


def wait_for_first(references: list[Any], timeout: float | None) -> Any:
    """The first reference that is ready; raises ``TimeoutError`` when none is."""
    done, _ = ray.wait(references, num_returns=1, timeout=timeout)
    if not done:
        raise GetTimeoutError(f"no engine answered for {timeout:g} s")
    return done[0]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # Of an actor that could not be made, Ray's text ends with the error that it raised.
    return lines[-1] if "creation task" in lines[0] else lines[0]
