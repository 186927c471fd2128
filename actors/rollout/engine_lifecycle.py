"""Engines of a group from their start to their end: started, lost, started again, closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Self

import ray

from actors.cluster.ray_watch import ray_is_usable
from actors.rollout.calls import SamplingCalls, collect
from actors.rollout.config import RolloutConfig
from actors.rollout.engine import RolloutEngine
from actors.rollout.engines import engine_name, raise_first
from actors.rollout.lengths import within_model
from actors.rollout.messages import EngineInfo
from actors.rollout.placement import EnginePlacement, places_on_nodes
from actors.rollout.turn_group import TurnGroup
from actors.rollout.turn_server import CONCURRENCY_GROUPS
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError, RolloutError

CLOSE_SECONDS = 2.0
"""How long an engine that is ended may take to free its shared memory; one that is sampling does not answer."""


class StartedEngines(TurnGroup):
    """The actors of :class:`~actors.rollout.group.RolloutGroup`, whose arguments these are."""

    engine_class: type[RolloutEngine] = RolloutEngine

    def __init__(self, config: RolloutConfig, *, scheduling: Sequence[Any] | None = None) -> None:
        if not ray.is_initialized():
            raise RolloutError("Ray is not running in this process: call ray.init() first")
        if scheduling is not None and len(scheduling) != config.num_engines:
            raise ConfigError.of(
                "scheduling", len(scheduling), f"expected one strategy for each of {config.num_engines} engines"
            )
        super().__init__()
        self.config = config = within_model(config)
        self._require_push = config.require_push
        self._actors: dict[int, Any] = {}
        self._infos: dict[int, EngineInfo] = {}
        self._lost: dict[int, RLBackendError] = {}
        self._restarting = {engine: threading.Lock() for engine in range(config.num_engines)}
        self._closed = False
        self._sampling = SamplingCalls(config.sampling_timeout)
        self._placement = EnginePlacement(config, scheduling)
        try:
            self._start(range(config.num_engines))
        except BaseException:
            self.close()
            raise

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        """Engines that died, are dirty or did not restart, with the error that says so."""
        return dict(self._lost)

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """What each engine said when it started, even one that is being restarted."""
        return dict(self._infos)

    def _members(self) -> dict[int, tuple[Any, EngineInfo]]:
        actors, infos = dict(self._actors), dict(self._infos)
        return {engine: (actor, infos[engine]) for engine, actor in actors.items()}

    def _lose(self, engine: int, actor: Any, error: RLBackendError) -> None:
        """Says nothing about an engine that was restarted since. The first reason why one died is kept."""
        if self._actors.get(engine) is actor and not isinstance(self._lost.get(engine), EngineDeadError):
            self._lost[engine] = error

    def restart(self, engine: int) -> EngineInfo:
        """Replaces an engine (dead, dirty or healthy) with a new one, which has the weights of the model directory and all
        LoRA tenants at the versions that are served.

        Threads that restart the same engine do so one after the other.

        Raises:
            ConfigError: no such engine.
            RolloutError: the new engine did not start, or the group is closed.
        """
        if engine not in range(self.config.num_engines):
            raise ConfigError.of("engine", engine, f"the group has engines 0 to {self.config.num_engines - 1}")
        with self._restarting[engine]:
            with self._lock:
                if engine in self._actors:
                    _end([self._actors.pop(engine)])
                self._lost[engine] = EngineDeadError(f"{engine_name(engine)} was ended by a restart that did not complete")
            try:
                self._start([engine])
            except RLBackendError as error:
                self._lost[engine] = error
                raise
            return self._infos[engine]

    def close(self) -> None:
        """Ends every engine."""
        self._closed = True
        self._end_turns(RolloutError("the rollout group is closed"))
        actors = list(self._actors.values())
        self._actors.clear()
        try:
            if ray_is_usable():
                _end(actors)
                self._placement.release()
        finally:
            self.adapter_memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, engines: Sequence[int]) -> None:
        actors = {engine: self._make_actor(engine) for engine in engines}
        names = {engine: engine_name(engine) for engine in engines}
        try:
            nodes = collect(
                {engine: actor.node.remote() for engine, actor in actors.items()}, names, self.config.start_timeout
            )
            raise_first(nodes)
            places = places_on_nodes({**{engine: info.node_id for engine, info in self._infos.items()}, **nodes})
            calls = {engine: actor.start.remote(places[engine]) for engine, actor in actors.items()}
            outcomes = collect(calls, names, self.config.start_timeout)
            raise_first(outcomes)
            with self._changing:
                self._bring_adapters(actors, outcomes)
                with self._lock:
                    self._infos.update(outcomes)
                    self._actors.update(actors)
                    for engine in actors:
                        self._lost.pop(engine, None)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise
        if self._closed:  # by another thread, which may not have seen them
            for engine, actor in actors.items():
                self._actors.pop(engine, None)
                ray.kill(actor)
            raise RolloutError(f"the rollout group was closed while {', '.join(names.values())} started")

    def _make_actor(self, engine: int) -> Any:
        actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(self.engine_class)
        options = self._placement.options(engine)
        return actor.options(**options).remote(self.config, engine, self._placement.device, self._require_push)


def _end(actors: Sequence[Any]) -> None:
    """Kills actors, which runs no exit handlers, once they have freed their shared memory."""
    if actors:
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)
    for actor in actors:
        ray.kill(actor)
