"""A group of vLLM engines that sample as one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import ray

from actors.cluster.watch import ray_is_usable
from actors.rollout.calls import PendingSamples, SamplingCalls, collect
from actors.rollout.config import RolloutConfig, SamplingConfig
from actors.rollout.engine import RolloutEngine
from actors.rollout.engines import FixedEngines, engine_name, raise_first
from actors.rollout.lengths import within_model
from actors.rollout.messages import EngineInfo
from actors.rollout.placement import EnginePlacement, places_on_nodes
from actors.rollout.requests import check_prompts, requests_of, shares_of
from actors.rollout.sample import Sample
from actors.rollout.turn_group import TurnGroup
from actors.rollout.turn_server import CONCURRENCY_GROUPS
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError, RolloutError

CLOSE_SECONDS = 2.0
"""How long an engine that is ended may take to free its shared memory; one that is sampling does not answer."""


class RolloutGroup(TurnGroup):
    """Starts ``config.num_engines`` engines, each a Ray actor, and samples over all of them.

    An engine that dies raises :class:`~rl_backend.contracts.EngineDeadError` once, in the call that it was serving, and one
    whose weight update fails raises :class:`~rl_backend.contracts.EngineDirtyError`, in the push; later calls go to the
    engines that are left, until :meth:`restart`. When none is left, every call raises.

    Args:
        config: the engines.
        scheduling: for each engine a Ray scheduling strategy, for example a bundle of a placement group that it shares with
            training; None reserves GPUs and ``config.cores_per_engine`` for them where Ray has them free.

    Raises:
        ConfigError: a configuration that cannot work here, or a model that is not on an engine's node.
        UnsupportedError: the cluster does not have the GPUs or CPUs.
        RolloutError: an engine that did not start.
    """

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

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        seeds: Sequence[int] | None = None,
        require_version: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        timeout: float | None = None,
    ) -> list[Sample]:
        """Samples ``sampling.n`` responses of each prompt; prompt by prompt, in the caller's order.

        Args:
            prompts: token ids; each prompt is shorter than the engines' ``max_model_len``.
            seeds: one for each sample, in the order of the result (see :func:`~actors.rollout.sample.sample_seeds`). With
                seeds a sample depends neither on the number of engines nor on batching.
            require_version: refuse weights that are older; with an adapter, versions of it that are older.
            adapter: name of a LoRA tenant, whose last pushed version works beside the weights; or one for each prompt, None
                for the weights alone. They are sampled in one batch, which ``max_adapters`` tenants have room in.
            timeout: seconds to wait.

        Raises:
            BatchError: an empty or too long prompt, an unknown token id, a wrong number of seeds.
            ConfigError: stop strings, and engines without a tokenizer.
            EngineDeadError: an engine died while it served this call, or none is left.
            EngineDirtyError: an engine whose last weight update failed.
            RolloutError: a tenant that has not been pushed, or weights with an adapter merged into them.
            WeightVersionError: an engine's weights are older than ``require_version``.
        """
        pending = self.submit(prompts, sampling, seeds=seeds, require_version=require_version, adapter=adapter)
        return pending.result(timeout)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        *,
        seeds: Sequence[int] | None = None,
        require_version: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> PendingSamples:
        """:meth:`generate` without waiting. A later push waits for it, so it samples with the present weights."""
        check_prompts(prompts, sampling, seeds, self.config, next(iter(self._infos.values())))
        with self._lock:
            actors = self._living()
            chosen = self._chosen(adapter, len(prompts))
            note = partial(self._note_call, actors)
            pending = PendingSamples(prompts, sampling.n, note, self._sampling)
            for (engine, actor), share in zip(actors.items(), shares_of(len(prompts), len(actors)), strict=True):
                if share:
                    parts = [requests_of(prompt, prompts, sampling.n, seeds) for prompt in share]
                    requests = [request for part in parts for request in part]
                    adapters = chosen and [chosen[prompt] for prompt, part in zip(share, parts, strict=True) for _ in part]
                    reference = actor.generate.remote(requests, sampling, require_version, adapters)
                    pending.add(reference, engine, share)
                    self._sampling.add(engine, reference)
        return pending

    def fixed(self) -> FixedEngines:
        """The present engines, for work that must go to the same processes from beginning to end."""
        members, lost = self._members(), self.lost_engines
        locks = {"lock": self._lock, "changing": self._changing}
        return FixedEngines(self.config, members, lost, **locks, sampling=self._sampling, lose=self._lose)

    def attach_weight_sync(self) -> None:
        """From now on engines, even those restarted later, refuse to sample until weights have been pushed."""
        self._require_push = True
        raise_first(self.call("require_push"))

    def forget_weights(self) -> None:
        """For another model: engines refuse to sample until the next push, whose version may be any.

        Raises:
            EngineDeadError, EngineDirtyError: of an engine that cannot.
        """
        self._require_push = True
        raise_first(self.call("forget_weights"))

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

    def sleep(self, level: int = 1) -> None:
        """Frees the engines' GPU memory for training: level 1 keeps the weights in host memory, 2 drops them.

        Raises:
            UnsupportedError: on a CPU, or without ``sleep_mode``.
        """
        raise_first(self.call("sleep", level))

    def wake_up(self) -> None:
        """Takes the GPU memory back."""
        raise_first(self.call("wake_up"))

    def describe(self) -> dict[int, EngineInfo]:
        """Fresh facts about every living engine."""
        outcomes = self.call("describe")
        raise_first(outcomes)
        return outcomes

    def close(self) -> None:
        """Ends every engine."""
        self._closed = True
        self._end_turns(RolloutError("the rollout group is closed"))
        actors = list(self._actors.values())
        self._actors.clear()
        if ray_is_usable():
            _end(actors)
            self._placement.release()

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
                self._bring_adapters(actors)
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

    def _note_call(self, actors: dict[int, Any], engine: int, outcome: Any) -> None:
        self._note(engine, actors[engine], outcome)


def _end(actors: Sequence[Any]) -> None:
    """Kills actors, which runs no exit handlers, once they have freed their shared memory."""
    if actors:
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)
    for actor in actors:
        ray.kill(actor)
