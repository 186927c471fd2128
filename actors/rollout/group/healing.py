"""Healing of a group of engines: one that is lost is started again, with backoff and up to a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actors.cluster import prometheus
from actors.cluster.ray_watch import ray_is_usable
from actors.rollout.group.engines import EngineSet, engine_name
from actors.rollout.group.heartbeats import BEAT_SECONDS, Heartbeats
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RLBackendError, UnsupportedError

_HOUR = 3600.0
_LONGEST_BACKOFF = 60.0


@dataclass(frozen=True)
class EngineEvent:
    """What became of an engine.

    Attributes:
        kind: ``died``; ``hung``, which is stopped processes too; ``dirty``; or ``replaced``.
        reason: the error; of a replacement, why the engine before it was lost.
        seconds: from a loss to the replacement.
    """

    engine: int
    kind: Literal["died", "hung", "dirty", "replaced"]
    reason: str
    seconds: float = 0.0


class Healing:
    """A thread that listens to the engines' heartbeats, and one for each engine that is being started again.

    Args:
        replace: starts a lost engine again, and gives it weights where that is possible.

    Attributes:
        listeners: called with every event, in these threads.
    """

    def __init__(self, engines: EngineSet, replace: Callable[[int], None]) -> None:
        self._engines, self._replace = engines, replace
        self._limit = engines.config.max_restarts
        self._heartbeats = Heartbeats(engines)
        self._restarts: dict[int, list[float]] = {}
        # Losses that were told of, and engines that are being started again or were given up.
        self._told: dict[int, RLBackendError] = {}
        self._busy: set[int] = set()
        self._closed = threading.Event()
        self.listeners: list[Callable[[EngineEvent], None]] = []

    def start(self) -> None:
        self._engines.heals = self._limit > 0
        threading.Thread(target=self._watch, name="heartbeats of engines", daemon=True).start()

    def close(self) -> None:
        self._engines.heals = False
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self._heartbeats.beat()
            except Exception:  # Ray raises errors of any type while it shuts down
                if self._closed.is_set() or not ray_is_usable():
                    return
                raise
            self.look()

    def look(self) -> None:
        """Begins to replace engines that are lost by now."""
        for engine, error in self._engines.lost_engines.items():
            if engine not in self._busy and self._told.get(engine) is not error:
                self._told[engine] = error
                self._tell(EngineEvent(engine, _kind_of(error), _reason(error)))
                if self._limit:
                    self._busy.add(engine)
                    name = f"replacement of {engine_name(engine)}"
                    threading.Thread(target=self._heal, args=(engine, error), name=name, daemon=True).start()

    def _heal(self, engine: int, error: RLBackendError) -> None:
        lost, reason = time.monotonic(), _reason(error)
        restarts = self._restarts.setdefault(engine, [])
        while not self._closed.is_set():
            restarts[:] = [each for each in restarts if each > time.monotonic() - _HOUR]
            if len(restarts) >= self._limit:
                self._engines.give_up(_too_often(engine, error, len(restarts)))
                return
            if restarts:
                self._closed.wait(min(2.0 ** len(restarts), _LONGEST_BACKOFF))
            restarts.append(time.monotonic())
            try:
                self._replace(engine)
            except UnsupportedError:
                # There is no room for it now, which is no failure of the engine.
                restarts.pop()
                self._closed.wait(_LONGEST_BACKOFF)
            except RLBackendError as failed:
                error = failed
            else:
                self._tell(EngineEvent(engine, "replaced", reason, time.monotonic() - lost))
                self._told.pop(engine, None)
                self._busy.discard(engine)
                return

    def _tell(self, event: EngineEvent) -> None:
        if not self._closed.is_set():
            prometheus.count("rl_backend_engine_events_total", 1, engine=str(event.engine), kind=event.kind)
            for listener in list(self.listeners):
                listener(event)


def _kind_of(error: RLBackendError) -> Literal["died", "hung", "dirty"]:
    if isinstance(error, EngineDirtyError):
        return "dirty"
    return "hung" if error.details.get("hung") or "sampling_timeout" in error.details else "died"


def _reason(error: RLBackendError) -> str:
    return str(error).removesuffix("; restart it")


def _too_often(engine: int, error: RLBackendError, times: int) -> EngineDeadError:
    name = engine_name(engine)
    return EngineDeadError(
        f"{name} was started again {times} times within an hour (RolloutConfig.max_restarts), and is lost again: "
        f"{_reason(error)}",
        engine=name,
        max_restarts=times,
    )
