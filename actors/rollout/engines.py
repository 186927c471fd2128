"""Calls of several engines at once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from actors.rollout.calls import SamplingCalls, collect
from actors.rollout.config import RolloutConfig
from actors.rollout.messages import EngineInfo
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RLBackendError, RolloutError


class EngineSet(ABC):
    """Engines by number, and calls of all that are alive.

    Attributes:
        config: of every engine.
    """

    config: RolloutConfig
    _lock: threading.Lock
    _changing: threading.Lock
    _sampling: SamplingCalls

    @abstractmethod
    def _members(self) -> dict[int, tuple[Any, EngineInfo]]:
        """Actor and facts of every engine, dead or alive."""

    @property
    @abstractmethod
    def lost_engines(self) -> dict[int, RLBackendError]:
        """Engines that died, are dirty or did not restart, with the error that says so."""

    @abstractmethod
    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None:
        """Takes ``engine`` out of service while it is ``actor``."""

    @property
    def engines(self) -> tuple[int, ...]:
        """Numbers of the engines that are alive."""
        lost = self.lost_engines
        return tuple(engine for engine in sorted(self._members()) if engine not in lost)

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """What each engine said when it started."""
        return {engine: info for engine, (_, info) in self._members().items()}

    def call(
        self, method: str, *args: Any, each: Callable[[int], tuple[Any, ...]] | None = None, timeout: float = 600.0
    ) -> dict[int, Any]:
        """Calls a method of every living engine at once; each engine's result, or its error as a value.

        Args:
            method: of :class:`~actors.rollout.engine.RolloutEngine`.
            args: the same for every engine.
            each: further arguments by engine number.
            timeout: seconds after which an engine counts as dead, from when it has done the sampling asked of it before,
                for which it has ``RolloutConfig.sampling_timeout``.
        """
        return self.gather(self.start_call(method, *args, each=each), timeout)

    def start_call(self, method: str, *args: Any, each: Callable[[int], tuple[Any, ...]] | None = None) -> dict[int, Any]:
        """:meth:`call` without waiting; hand the result to :meth:`gather`."""
        return {
            engine: getattr(actor, method).remote(*args, *(each(engine) if each else ()))
            for engine, actor in self._living().items()
        }

    def gather(self, calls: dict[int, Any], timeout: float = 600.0) -> dict[int, Any]:
        """Waits for :meth:`start_call`."""
        actors = {engine: actor for engine, (actor, _) in self._members().items()}
        hanging = self._sampling.wait(calls)
        answering = {engine: call for engine, call in calls.items() if engine not in hanging}
        outcomes = collect(answering, {engine: engine_name(engine) for engine in answering}, timeout)
        outcomes = {engine: hanging[engine] if engine in hanging else outcomes[engine] for engine in calls}
        for engine, outcome in outcomes.items():
            if engine in actors:
                self._note(engine, actors[engine], outcome)
        return outcomes

    def trace_actors(self) -> dict[str, Any]:
        """For a :class:`~actors.watch.trace.TraceCollector`."""
        members = self._members()
        return {engine_name(engine): members[engine][0] for engine in self.engines if engine in members}

    def actors(self) -> list[Any]:
        """Ray handles of the living engines, in the order of their numbers."""
        return list(self._living().values())

    def note(self, engine: int, outcome: Any) -> None:
        """Takes an engine whose outcome says that it is dead or dirty out of service."""
        member = self._members().get(engine)
        if member is not None:
            self._note(engine, member[0], outcome)

    def abandon(self, engines: Iterable[int], reason: str, *, kill: bool) -> dict[int, EngineDirtyError]:
        """Takes engines whose update began, and will not end, out of service; each one's error.

        Args:
            kill: end their processes, which may wait for ever in a collective.
        """
        errors: dict[int, EngineDirtyError] = {}
        members = self._members()
        for engine in engines:
            name = engine_name(engine)
            errors[engine] = EngineDirtyError(
                f"{name}: a weight update had begun and was abandoned ({reason}); restart it", engine=name
            )
            if engine not in members:
                continue
            actor, _ = members[engine]
            self._note(engine, actor, errors[engine])
            if kill:
                ray.kill(actor)
            else:
                actor.abandon_update.remote(reason)
        return errors

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Holds back new requests from this process, and pushes of adapters, while weights are loaded."""
        with self._changing, self._lock:
            yield

    def _note(self, engine: int, actor: Any, outcome: Any) -> None:
        if isinstance(outcome, EngineDeadError | EngineDirtyError):
            self._lose(engine, actor, outcome)
        if isinstance(outcome, EngineDeadError):
            ray.kill(actor)

    def _living(self) -> dict[int, Any]:
        """Actors by engine, taken at one time: another thread may be restarting one."""
        members, lost = self._members(), self.lost_engines
        living = {engine: members[engine][0] for engine in sorted(members) if engine not in lost}
        if not living:
            if not lost:
                raise RolloutError("the rollout group is closed")
            reasons = "; ".join(str(error) for error in lost.values())
            kind = type(next(iter(lost.values())))
            raise kind(f"no rollout engine is left: {reasons}", engines=sorted(lost))
        return living


class FixedEngines(EngineSet):
    """The engines that a group has at one time, whatever is restarted later.

    A push goes to the same processes from its first step to its last. One that is restarted in between is dead to the push,
    and its successor, which has verified nothing, is no part of it.

    Args:
        members: actor and facts by engine.
        lost: engines that are out of service already.
        lose: told of every engine that this set loses.
    """

    def __init__(
        self,
        config: RolloutConfig,
        members: Mapping[int, tuple[Any, EngineInfo]],
        lost: Mapping[int, RLBackendError],
        *,
        lock: threading.Lock,
        changing: threading.Lock,
        sampling: SamplingCalls,
        lose: Callable[[int, Any, RLBackendError], None],
    ) -> None:
        self.config = config
        self._fixed = dict(members)
        self._lost = dict(lost)
        self._lock = lock
        self._changing = changing
        self._sampling = sampling
        self._tell = lose

    def _members(self) -> dict[int, tuple[Any, EngineInfo]]:
        return self._fixed

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        return dict(self._lost)

    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None:
        self._lost[engine] = error
        self._tell(engine, actor, error)


def engine_name(engine: int) -> str:
    """What messages call an engine."""
    return f"engine {engine}"


def are_on_node(engines: EngineSet, node_id: str, host: str) -> bool:
    """Whether all living engines are on that Ray node and share its /dev/shm."""
    infos = engines.infos
    return all((infos[engine].node_id, infos[engine].host) == (node_id, host) for engine in engines.engines)


def raise_first(outcomes: Mapping[int, Any]) -> None:
    """Raises the first outcome of :meth:`EngineSet.call` that is an error."""
    for outcome in outcomes.values():
        if isinstance(outcome, RLBackendError):
            raise outcome
