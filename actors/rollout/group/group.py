"""A group of vLLM engines that sample as one: started, called, lost, started again, closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import ray

from actors.cluster.ray_watch import ray_is_usable
from actors.rollout.config import RolloutConfig, SamplingConfig, require_tokenizer, within_model
from actors.rollout.engine.engine import CONCURRENCY_GROUPS, RolloutEngine
from actors.rollout.group.adapters import GroupAdapters
from actors.rollout.group.calls import PendingSamples, check_prompts, collect
from actors.rollout.group.engines import EngineSet, engine_name, raise_failures
from actors.rollout.group.routing import shares_of
from actors.rollout.group.turns import GroupTurns
from actors.rollout.messages import AdapterVersion, EngineInfo, Request, Sample
from actors.rollout.placement import EnginePlacement, places_on_nodes
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError, RolloutError

# How long an engine that is ended may take to free its shared memory; one that is sampling does not answer.
CLOSE_SECONDS = 2.0


class RolloutGroup:
    """Starts ``config.num_engines`` engines, each a Ray actor, and samples over all of them.

    An engine that dies raises :class:`~rl_backend.contracts.EngineDeadError` once, in the call that it was serving,
    and one whose weight update fails raises :class:`~rl_backend.contracts.EngineDirtyError`, in the push; later calls
    go to the engines that are left, until :meth:`restart`. When none is left, every call raises.

    Args:
        scheduling: for each engine a Ray scheduling strategy, for example a bundle of a placement group that it
            shares with training; None reserves GPUs and ``config.cores_per_engine`` for them where Ray has them free.

    Raises:
        ConfigError: a configuration that cannot work here, or a model that is not on an engine's node.
        UnsupportedError: the cluster does not have the GPUs or CPUs.
        RolloutError: an engine that did not start.

    Attributes:
        engine_set: the engines, to call them by hand.
        lora: versions of LoRA tenants that they serve.
        turns: of episodes.
        last_sync: key of the last push of weights, whichever way they took.
    """

    engine_class: type[RolloutEngine] = RolloutEngine

    def __init__(self, config: RolloutConfig, *, scheduling: Sequence[Any] | None = None) -> None:
        if scheduling is not None and len(scheduling) != config.num_engines:
            raise ConfigError.of(
                "scheduling", len(scheduling), f"expected one strategy for each of {config.num_engines} engines"
            )
        self.config = config = within_model(config)
        self.engine_set = EngineSet(config)
        self.lora = GroupAdapters(self.engine_set)
        self.turns = GroupTurns(self.engine_set)
        self.last_sync = ""
        self._require_push = config.require_push
        self._restarting = {engine: threading.Lock() for engine in range(config.num_engines)}
        self._closed = False
        self._placement = EnginePlacement(config, scheduling)
        try:
            self._start(range(config.num_engines))
        except BaseException:
            self.close()
            raise

    @property
    def engines(self) -> tuple[int, ...]:
        return self.engine_set.engines

    @property
    def lost_engines(self) -> dict[int, RLBackendError]:
        """Engines that died, are dirty or did not restart, with the error that says so."""
        return self.engine_set.lost_engines

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """What each engine said when it started, even one that is being restarted."""
        return self.engine_set.infos

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        return self.lora.served

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
            seeds: one for each sample, in the order of the result (see :func:`~actors.rollout.messages.sample_seeds`). With
                seeds a sample depends neither on the number of engines nor on batching.
            require_version: refuse weights that are older; with an adapter, versions of it that are older.
            adapter: name of a LoRA tenant, whose last pushed version works beside the weights; or one for each prompt, None
                for the weights alone. They are sampled in one batch, which ``max_adapters`` tenants have room in.

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
        engines, n = self.engine_set, sampling.n
        require_tokenizer(self.config, sampling)
        check_prompts(prompts, n, seeds, next(iter(engines.infos.values())))
        with engines.lock:
            actors = engines.living()
            chosen = self.lora.chosen(adapter, len(prompts))
            pending = PendingSamples(prompts, n, partial(self._note, actors), engines.sampling)
            for (engine, actor), share in zip(actors.items(), shares_of(len(prompts), len(actors)), strict=True):
                if share:
                    numbers = range(share.start * n, share.stop * n)
                    of_seeds = [None] * len(numbers) if seeds is None else seeds[numbers.start : numbers.stop]
                    requests = [
                        Request(prompts[number // n], sampling, seed, chosen[number // n], require_version)
                        for number, seed in zip(numbers, of_seeds, strict=True)
                    ]
                    reference = actor.generate.remote(requests)
                    pending.add(reference, engine, share)
                    engines.sampling.add(engine, reference)
        return pending

    def remove_adapter(self, tenant: str) -> None:
        """Refuses requests for a LoRA tenant from now on, and frees its adapter in every engine."""
        self.lora.remove(tenant)

    def trace_actors(self) -> dict[str, Any]:
        return self.engine_set.trace_actors()

    def attach_weight_sync(self) -> None:
        """From now on engines, even those restarted later, refuse to sample until weights have been pushed."""
        self._require_push = True
        raise_failures(self.engine_set.call("require_push"))

    def forget_weights(self) -> None:
        """For another model: engines refuse to sample until the next push, whose version may be any."""
        self._require_push = True
        raise_failures(self.engine_set.call("forget_weights"))

    def sleep(self, level: int = 1) -> None:
        """Frees the engines' GPU memory for training: level 1 keeps the weights in host memory, 2 drops them.

        At level 2 turns that pause (``turns_at_push="pause"``) raise a ``RolloutError``; at level 1 they go on afterwards.

        Raises:
            UnsupportedError: on a CPU, or without ``sleep_mode``.
            RolloutError: a weight update has begun and not ended.
        """
        # Engines wait for turns in flight, which may take as long as a request.
        with self.engine_set.changing:
            raise_failures(self.engine_set.call("sleep", level, timeout=self.config.sampling_timeout))

    def wake_up(self) -> None:
        """Takes the GPU memory back; raises as :meth:`sleep`."""
        with self.engine_set.changing:
            raise_failures(self.engine_set.call("wake_up"))

    def describe(self) -> dict[int, EngineInfo]:
        outcomes = self.engine_set.call("describe")
        raise_failures(outcomes)
        return outcomes

    def restart(self, engine: int) -> EngineInfo:
        """Replaces an engine (dead, dirty or healthy) with a new one, which has the weights of the model directory and all
        LoRA tenants at the versions that are served.

        Raises:
            ConfigError: no such engine.
            RolloutError: the new engine did not start, or the group is closed.
        """
        if engine not in range(self.config.num_engines):
            raise ConfigError.of("engine", engine, f"the group has engines 0 to {self.config.num_engines - 1}")
        # Threads that restart the same engine do so one after the other.
        with self._restarting[engine]:
            with self.engine_set.lock:
                ended = EngineDeadError(f"{engine_name(engine)} was ended by a restart that did not complete")
                actor = self.engine_set.remove(engine, ended)
                _end([] if actor is None else [actor])
            try:
                self._start([engine])
            except RLBackendError as error:
                self.engine_set.remove(engine, error)
                raise
            return self.infos[engine]

    def close(self) -> None:
        self._closed = True
        self.turns.end(RolloutError("the rollout group is closed"))
        actors = self.engine_set.remove_all()
        try:
            if ray_is_usable():
                _end(actors)
                self._placement.release()
        finally:
            self.lora.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, actors: dict[int, Any], engine: int, outcome: Any) -> None:
        self.engine_set.note(engine, outcome, actors[engine])

    def _start(self, engines: Sequence[int]) -> None:
        actors = {engine: self._make_actor(engine) for engine in engines}
        names = {engine: engine_name(engine) for engine in engines}
        try:
            nodes = collect(
                {engine: actor.node.remote() for engine, actor in actors.items()}, names, self.config.start_timeout
            )
            raise_failures(nodes)
            places = places_on_nodes({**{engine: info.node_id for engine, info in self.infos.items()}, **nodes})
            calls = {engine: actor.start.remote(places[engine]) for engine, actor in actors.items()}
            outcomes = collect(calls, names, self.config.start_timeout)
            raise_failures(outcomes)
            with self.engine_set.changing:
                self.lora.bring(actors, outcomes)
                with self.engine_set.lock:
                    self.engine_set.add(actors, outcomes)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise
        if self._closed:  # by another thread, which may not have seen them
            for engine, actor in actors.items():
                self.engine_set.remove(engine)
                ray.kill(actor)
            raise RolloutError(f"the rollout group was closed while {', '.join(names.values())} started")

    def _make_actor(self, engine: int) -> Any:
        actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(self.engine_class)
        options = self._placement.options(engine)
        return actor.options(**options).remote(self.config, engine, self._placement.device, self._require_push)


def _end(actors: Sequence[Any]) -> None:
    # A kill runs no exit handlers, so shared memory is freed before.
    if actors:
        ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)
    for actor in actors:
        ray.kill(actor)
