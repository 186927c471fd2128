"""Calls of several engines at once, and what is known of those that are lost."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import ray

from actors.rollout.config import RolloutConfig
from actors.rollout.group.calls import collect
from actors.rollout.messages import EngineInfo
from rl_backend.contracts import EngineDeadError, EngineDirtyError, RLBackendError, RolloutError


class EngineSet:
    """Engines by number, and calls of all that are alive.

    Attributes:
        lock: of calls that sample: held while they are made, and while engines change.
        changing: of adapters, weights, sleep and engines that join: one changes at a time. Taken before :attr:`lock`.
        moved: notified when engines join, are lost or are given up, and when they have answered a request.
        heals: lost engines are being replaced.
        asked: what calls have asked for and is not answered. It is of the weights and adapters of that moment.
        given_up: the error that every call to sample, and every push, raises from now on.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.changing = threading.Lock()
        self.moved = threading.Condition()
        self.heals = False
        self.asked: set[Future[Any]] = set()
        self.given_up: RLBackendError | None = None
        self._actors: dict[int, Any] = {}
        self._infos: dict[int, EngineInfo] = {}
        self._lost: dict[int, RLBackendError] = {}
        # Engines that lack weights of the trainer: the next push brings them.
        self._unpushed: set[int] = set()
        self._origin: EngineSet | None = None

    def fixed(self) -> Self:
        """The present engines, those that lack weights too, whatever is restarted later. This set is told of engines that
        the fixed one loses.
        """
        # A push goes to the same processes from its first step to its last. One that is restarted in between is dead to the
        # push, and its successor, which has verified nothing, is no part of it.
        fixed = copy.copy(self)
        fixed._actors, fixed._infos, fixed._lost = dict(self._actors), dict(self._infos), dict(self._lost)
        fixed._unpushed, fixed._origin = set(), self
        return fixed

    def add(self, actors: Mapping[int, Any], infos: Mapping[int, EngineInfo], *, lack_weights: bool = False) -> None:
        self._infos.update(infos)
        self._actors.update(actors)
        for engine in actors:
            self._lost.pop(engine, None)
            (self._unpushed.add if lack_weights else self._unpushed.discard)(engine)
        self._notify()

    def have_weights(self, engines: Iterable[int]) -> None:
        """Of a :meth:`fixed` set: these of its engines serve from now on, if they were lacking weights."""
        origin = self._origin
        if origin is not None:
            origin._unpushed -= {engine for engine in engines if origin._actors.get(engine) is self._actors.get(engine)}
            origin._notify()

    def give_up(self, error: RLBackendError) -> None:
        self.given_up = error
        self._notify()

    def require_hope(self) -> None:
        if self.given_up is not None:
            raise self.given_up

    def wait_for_engine(self, error: RLBackendError) -> None:
        """Waits until an engine can be given weights; raises ``error`` where none will."""
        since = time.monotonic()
        with self.moved:
            while not self.living(pushable=True, required=False):
                self.require_hope()
                if not self.comes(since):
                    raise error
                self.moved.wait(1.0)

    def comes(self, since: float) -> bool:
        """Whether one that is lost is being replaced, for whoever has waited since ``since`` (``time.monotonic()``)."""
        # Who samples may be what the next push waits for.
        waits_for_push = self.living(pushable=True, required=False)
        return self.heals and not waits_for_push and time.monotonic() < since + 2 * self.config.start_timeout

    def wait_for_calls(self) -> None:
        """Waits for what calls have asked for up to now, as long as there is an engine for it."""
        asked, serving = set(self.asked), self._origin or self
        with self.moved:
            while not self.asked.isdisjoint(asked) and serving.engines:
                self.moved.wait(1.0)

    def remove(self, engine: int, error: RLBackendError | None = None) -> Any:
        actor = self._actors.pop(engine, None)
        if error is not None:
            self._lost[engine] = error
        return actor

    def remove_all(self) -> list[Any]:
        actors, self._actors = self._actors, {}
        return list(actors.values())

    @property
    def engines(self) -> tuple[int, ...]:
        return tuple(self.living(required=False))

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """What each engine said when it started, even one that is being restarted."""
        return dict(self._infos)

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        """Engines that died, are dirty or did not restart, with the error that says so."""
        return dict(self._lost)

    def actors(self) -> list[Any]:
        return list(self.living().values())

    def living(self, *, pushable: bool = False, required: bool = True) -> dict[int, Any]:
        """The actors of engines that serve, with ``pushable`` also of those that lack weights."""
        # Taken at one time: another thread may be restarting an engine.
        actors, lost = dict(self._actors), self.lost_engines
        out = lost.keys() if pushable else lost.keys() | self._unpushed
        living = {engine: actors[engine] for engine in sorted(actors) if engine not in out}
        if not living and required:
            raise self.none_left()
        return living

    def none_left(self) -> RLBackendError:
        """The error of a call where no engine serves."""
        lost, waiting = self.lost_engines, ", ".join(map(engine_name, sorted(self._actors)))
        if lost:
            kind, reasons = type(next(iter(lost.values()))), "; ".join(map(str, lost.values()))
            return kind(f"no rollout engine is left: {reasons}", engines=sorted(lost))
        if waiting:
            return RolloutError(f"{waiting} was restarted and has no weights of the trainer yet: push before sampling")
        return RolloutError("the rollout group is closed")

    def call(
        self, method: str, *args: Any, each: Callable[[int], tuple[Any, ...]] | None = None, timeout: float | None = None
    ) -> dict[int, Any]:
        """Calls a method of every living engine at once; each engine's result, or its error as a value.

        Args:
            each: further arguments by engine number.
            timeout: seconds after which an engine counts as dead; None takes ``call_timeout`` of the configuration.
        """
        return self.gather(self.start_call(method, *args, each=each), timeout)

    def start_call(self, method: str, *args: Any, each: Callable[[int], tuple[Any, ...]] | None = None) -> dict[int, Any]:
        """:meth:`call` without waiting; hand the result to :meth:`gather`."""
        return {
            engine: getattr(actor, method).remote(*args, *(each(engine) if each else ()))
            for engine, actor in self.living().items()
        }

    def gather(self, calls: dict[int, Any], timeout: float | None = None) -> dict[int, Any]:
        actors, timeout = dict(self._actors), self.config.call_timeout if timeout is None else timeout
        outcomes = collect(calls, {engine: engine_name(engine) for engine in calls}, timeout)
        for engine, outcome in outcomes.items():
            if engine in actors:
                self.note(engine, outcome, actors[engine])
        return outcomes

    def note(self, engine: int, outcome: Any, actor: Any = None) -> None:
        """Takes an engine, as long as ``actor`` is its process, out of service where its outcome is that it is dead or
        dirty.
        """
        actor = self._actors.get(engine) if actor is None else actor
        if actor is None:
            return
        if isinstance(outcome, EngineDeadError | EngineDirtyError):
            self._lose(engine, actor, outcome)
        if isinstance(outcome, EngineDeadError):
            ray.kill(actor)

    def abandon(self, engines: Iterable[int], reason: str, *, kill: bool) -> dict[int, EngineDirtyError]:
        """Takes engines whose update began, and will not end, out of service, or ends them; each one's error."""
        errors: dict[int, EngineDirtyError] = {}
        for engine in engines:
            name, actor = engine_name(engine), self._actors.get(engine)
            errors[engine] = EngineDirtyError(
                f"{name}: a weight update had begun and was abandoned ({reason}); restart it", engine=name
            )
            if actor is None:
                continue
            self.note(engine, errors[engine], actor)
            if kill:
                ray.kill(actor)
            else:
                actor.abandon_update.remote(reason)
        return errors

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Holds back calls that sample, and pushes of adapters; those that were made before have been answered."""
        with self.changing, self.lock:
            self.wait_for_calls()
            yield

    def trace_actors(self) -> dict[str, Any]:
        actors = dict(self._actors)
        return {engine_name(engine): actors[engine] for engine in self.engines if engine in actors}

    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None:
        # Nothing about an engine that was restarted since; and the first reason why one died is kept.
        if self._actors.get(engine) is actor and not isinstance(self._lost.get(engine), EngineDeadError):
            self._lost[engine] = error
            self._notify()
            if self._origin is not None:
                self._origin._lose(engine, actor, error)

    def _notify(self) -> None:
        with self.moved:
            self.moved.notify_all()


def engine_name(engine: int) -> str:
    return f"engine {engine}"


def are_on_node(engines: EngineSet, node_id: str, host: str) -> bool:
    infos = engines.infos
    return all((infos[engine].node_id, infos[engine].host) == (node_id, host) for engine in engines.engines)


def raise_failures(outcomes: Mapping[int, Any]) -> None:
    """Raises when any outcome of :meth:`EngineSet.call` is an error: the first one's type, the text of all."""
    failures = [outcome for outcome in outcomes.values() if isinstance(outcome, RLBackendError)]
    if failures:
        first = failures[0]
        raise first if len(failures) == 1 else type(first)("; ".join(map(str, failures)), **first.details)
