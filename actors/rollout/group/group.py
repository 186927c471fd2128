"""A group of vLLM engines that sample as one: started, called, lost, started again, closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol, Self

import ray

from actors.cluster.processes import Process
from actors.cluster.ray_watch import ray_is_usable
from actors.rollout.config import RolloutConfig, SamplingConfig, require_bounded, require_tokenizer, within_model
from actors.rollout.engine.engine import CONCURRENCY_GROUPS, RolloutEngine
from actors.rollout.group.adapters import GroupAdapters
from actors.rollout.group.calls import PendingSamples, check_prompts, collect
from actors.rollout.group.engines import EngineSet, engine_name, raise_failures
from actors.rollout.group.healing import Healing
from actors.rollout.group.heartbeats import ending_stopped
from actors.rollout.group.turns import GroupTurns
from actors.rollout.messages import AdapterVersion, EngineInfo, Request, Sample, WakePart
from actors.rollout.placement import EnginePlacement, places_on_nodes
from rl_backend.contracts import ConfigError, EngineDeadError, RLBackendError, RolloutError, UnsupportedError

# How long an engine that is ended may take to free its shared memory; one that is sampling does not answer.
CLOSE_SECONDS = 2.0


class Publisher(Protocol):
    def give(self, engines: EngineSet) -> bool:
        """Brings engines that join to the weights that the others serve. False where those are not to be had any more:
        the next push brings them.
        """


class RolloutGroup:
    """Starts ``config.num_engines`` engines, each a Ray actor, and samples over all of them: prompts go to engines as they
    become free, the responses to one prompt to one engine.

    An engine that dies, hangs or is left dirty by a push is started again, up to ``config.max_restarts`` times an hour, with
    the weights and adapters that the others serve. Those sample meanwhile, also what it had not answered: with seeds the
    samples are the same. With ``max_restarts=0`` an engine that dies raises
    :class:`~rl_backend.contracts.EngineDeadError` in the call that it was serving, and one whose weight update fails
    :class:`~rl_backend.contracts.EngineDirtyError`, in the push; later calls go to the engines that are left, until
    :meth:`restart`. When none is left, every call raises.

    Args:
        scheduling: for each engine a Ray scheduling strategy, for example a bundle of a placement group that it
            shares with training; None reserves GPUs and ``config.cores_per_engine`` for them where Ray has them free.
        wait: for the engines to have started; else :meth:`join` does, and whatever starts meanwhile starts beside them.

    Raises:
        ConfigError: a configuration that cannot work here, or a model that is not on an engine's node.
        UnsupportedError: the cluster does not have the GPUs or CPUs.
        RolloutError: an engine that did not start.

    Attributes:
        engine_set: the engines, to call them by hand.
        lora: versions of LoRA tenants that they serve.
        turns: what is asked of the engines, by calls and by episodes.
        last_sync: key of the last push of weights, whichever way they took.
        publisher: what has pushed the weights that engines serve; None where they serve those of the directory.
        pushing: held while weights are pushed, and while an engine joins.
        healing: what replaces lost engines, and tells of it.
    """

    engine_class: type[RolloutEngine] = RolloutEngine

    def __init__(self, config: RolloutConfig, *, scheduling: Sequence[Any] | None = None, wait: bool = True) -> None:
        if scheduling is not None and len(scheduling) != config.num_engines:
            raise ConfigError.of(
                "scheduling", len(scheduling), f"expected one strategy for each of {config.num_engines} engines"
            )
        self.config = config = within_model(config)
        self.engine_set = EngineSet(config)
        self.lora = GroupAdapters(self.engine_set)
        self.turns = GroupTurns(self.engine_set)
        self.last_sync = ""
        self.publisher: Publisher | None = None
        self.pushing = threading.Lock()
        self.healing = Healing(self.engine_set, partial(self._replace, lost_only=True))
        self._require_push = config.require_push
        self._restarting = {engine: threading.Lock() for engine in range(config.num_engines)}
        self._closed = False
        # Held while engines sleep: one that is started again would take the memory that they have given away.
        self._asleep: ExitStack | None = None
        self._starting: dict[int, Any] = {}
        self._placement = EnginePlacement(config, scheduling)
        self._opened: Future[None] = Future()
        if wait:
            self._open()
            self.join()
        else:
            threading.Thread(target=self._open, name="start of engines", daemon=True).start()

    def join(self) -> None:
        """Waits for engines that were not waited for, and raises what kept them from starting."""
        self._opened.result()

    def _open(self) -> None:
        try:
            self._start(range(self.config.num_engines))
            self.healing.start()
        except BaseException as error:  # noqa: BLE001 raised where it is waited for
            self._end_all()
            self._opened.set_exception(error)
        else:
            self._opened.set_result(None)

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
                for the weights alone. At one time an engine samples with ``max_adapters`` tenants.

        Raises:
            BatchError: an empty or too long prompt, an unknown token id, a wrong number of seeds.
            ConfigError: stop strings, and engines without a tokenizer; no ``top_k``, or temperature 0, and engines that
                return masks.
            EngineDeadError, EngineDirtyError: an engine was lost and is not replaced, or was too often.
            RolloutError: a tenant that has not been pushed, weights with an adapter merged into them, or engines that
                sleep or have no weights.
            TimeoutError: no answer within ``timeout`` seconds; what is left is given up.
            WeightVersionError: an engine's weights are older than ``require_version``.
        """
        pending = self.submit(prompts, sampling, seeds=seeds, require_version=require_version, adapter=adapter)
        try:
            return pending.result(timeout)
        except BaseException:  # Ctrl-C too: nobody gets what engines would still sample
            pending.cancel()
            raise

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
        # Copies: requests are sent later, when engines have room.
        prompts = [list(prompt) for prompt in prompts]
        engines, n = self.engine_set, sampling.n
        require_tokenizer(self.config, sampling)
        require_bounded(self.config, sampling)
        check_prompts(prompts, n, seeds, next(iter(engines.infos.values())))
        with engines.lock:
            chosen = self.lora.chosen(adapter, len(prompts))
            requests = [
                [
                    Request(prompt, sampling, seed, version, require_version, waits=False)
                    for seed in ([None] * n if seeds is None else seeds[index * n : (index + 1) * n])
                ]
                for index, (prompt, version) in enumerate(zip(prompts, chosen, strict=True))
            ]
            # Those of one adapter begin together: there may be more adapters than slots.
            order = sorted(range(len(prompts)), key=lambda index: chosen.index(chosen[index]))
            asked = dict(zip(order, self.turns.ask([requests[index] for index in order]), strict=True))
        return PendingSamples(prompts, [asked[index] for index in range(len(prompts))])

    def remove_adapter(self, tenant: str) -> None:
        """Refuses requests for a LoRA tenant from now on, and frees its adapter in every engine."""
        self.lora.remove(tenant)

    def trace_actors(self) -> dict[str, Any]:
        return self.engine_set.trace_actors()

    def attach_weight_sync(self) -> None:
        """From now on engines, even those restarted later, refuse to sample until weights have been pushed."""
        self._require_push = True
        self._tell("require_push")

    def forget_weights(self) -> None:
        """For another model: engines refuse to sample until the next push, whose version may be any."""
        self._require_push, self.publisher = True, None
        self._tell("forget_weights")

    def sleep(self, level: int = 1) -> None:
        """Frees the engines' memory for training: level 1 keeps the weights in host memory, 2 drops them. On a CPU keys and
        values alone are freed.

        At level 2 turns that pause (``turns_at_push="pause"``) raise a ``RolloutError``; at level 1 they go on afterwards.

        Raises:
            UnsupportedError: without ``sleep_mode``.
            RolloutError: a weight update has begun and not ended.
        """
        with ExitStack() as starts:
            for lock in self._restarting.values() if self._asleep is None else ():
                starts.enter_context(lock)
            # Engines wait for turns in flight, which may take as long as a request.
            self._tell_all("sleep", level, timeout=self.config.sampling_timeout)
            self._asleep = self._asleep or starts.pop_all()

    def wake_up(self, part: WakePart = "all") -> None:
        """Takes the memory back; raises as :meth:`sleep`.

        Where ranks train on the same GPUs: ``wake_up("weights")``, then the push, and ``wake_up("kv_cache")`` when the ranks
        have moved their weights away. Keys and values are then never beside what trains.
        """
        self._tell_all("wake_up", part)
        # One that starts takes all it needs: beside weights alone there may be ranks. With none left, a push waits for one.
        if part != "weights" or not self.engine_set.engines:
            self._allow_starts()

    def _allow_starts(self) -> None:
        held, self._asleep = self._asleep, None
        if held is not None:
            held.close()

    def _tell_all(self, method: str, *args: Any, timeout: float | None = None) -> None:
        """Also engines that lack weights. One that is lost has no memory; the one in its place starts when others wake."""
        with self.engine_set.updating():
            engines = self.engine_set.fixed()
            if engines.heals and not engines.engines:
                return
            outcomes = engines.call(method, *args, timeout=timeout)
            replaced = EngineDeadError if engines.heals else ()
            raise_failures({engine: each for engine, each in outcomes.items() if not isinstance(each, replaced)})

    def describe(self) -> dict[int, EngineInfo]:
        outcomes = self.engine_set.call("describe")
        raise_failures(outcomes)
        return outcomes

    def restart(self, engine: int) -> EngineInfo:
        """Replaces an engine (dead, dirty or healthy) with a new one, which has all LoRA tenants at the versions that are
        served, and the weights: those of the model directory, or the last that were pushed. Where the trainer has others by
        now and those are not staged any more, it serves from the next push on.

        Raises:
            ConfigError: no such engine.
            RolloutError: the new engine did not start, or the group is closed.
        """
        if engine not in range(self.config.num_engines):
            raise ConfigError.of("engine", engine, f"the group has engines 0 to {self.config.num_engines - 1}")
        if self._asleep is not None:
            raise RolloutError(f"{engine_name(engine)} cannot start while engines sleep; call wake_up() first")
        self._replace(engine)
        return self.infos[engine]

    def _replace(self, engine: int, *, lost_only: bool = False) -> None:
        # Threads that restart the same engine do so one after the other.
        with self._restarting[engine]:
            if lost_only and (self._closed or engine not in self.lost_engines):
                return
            with self.engine_set.lock:
                ended = EngineDeadError(f"{engine_name(engine)} was ended by a restart that did not complete")
                actor = self.engine_set.remove(engine, ended)
                _end([] if actor is None else [actor])
            try:
                self._start([engine])
            except RLBackendError as error:
                self.engine_set.remove(engine, error)
                raise

    def close(self) -> None:
        self._end_all()
        # What still starts them must not ask Ray for more when the session ends.
        wait([self._opened], timeout=CLOSE_SECONDS)

    def _end_all(self) -> None:
        self._closed = True
        self.healing.close()
        self._allow_starts()
        self.turns.end(RolloutError("the rollout group is closed"))
        actors = self.engine_set.remove_all()
        try:
            if ray_is_usable():
                for actor in list(self._starting.values()):
                    ray.kill(actor)
                _end(actors)
                self._placement.release()
        finally:
            self.lora.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tell(self, method: str) -> None:
        with self.engine_set.updating():
            raise_failures(self.engine_set.call(method))

    def _start(self, engines: Sequence[int]) -> None:
        actors = {engine: self._make_actor(engine) for engine in engines}
        names = {engine: engine_name(engine) for engine in engines}
        self._starting |= actors
        try:
            found = self._located(actors)
            nodes = {engine: node for engine, (node, _) in found.items()}
            places = places_on_nodes({**{engine: info.node_id for engine, info in self.infos.items()}, **nodes})
            here = ray.get_runtime_context().get_node_id()
            # Engines have no heartbeat before they have joined.
            with ending_stopped([process for node, process in found.values() if node == here]):
                calls = {engine: actor.start.remote(places[engine]) for engine, actor in actors.items()}
                outcomes = collect(calls, names, self.config.start_timeout)
                raise_failures(outcomes)
                self._join(actors, outcomes)
        except BaseException:
            for actor in actors.values():
                ray.kill(actor)
            raise
        finally:
            for engine in actors:
                self._starting.pop(engine, None)
        if self._closed:  # by another thread, which may not have seen them
            for engine, actor in actors.items():
                self.engine_set.remove(engine)
                ray.kill(actor)
            raise RolloutError(f"the rollout group was closed while {', '.join(names.values())} started")

    def _located(self, actors: dict[int, Any]) -> dict[int, tuple[str, Process]]:
        names = {engine: engine_name(engine) for engine in actors}
        calls = {engine: actor.locate.remote() for engine, actor in actors.items()}
        _, waiting = ray.wait(list(calls.values()), num_returns=len(calls), timeout=self.config.start_timeout)
        if waiting:
            late = [names[engine] for engine, call in calls.items() if call in waiting]
            raise UnsupportedError(
                f"Ray has found no place for {', '.join(late)} for {self.config.start_timeout:g} s (start_timeout): what "
                "engines reserve is not free, or their node is gone",
                engines=late,
            )
        found = collect(calls, names, 0.0)
        raise_failures(found)
        return found

    def _join(self, actors: dict[int, Any], infos: dict[int, EngineInfo]) -> None:
        with self.pushing:
            have_weights = True
            if self.publisher is not None:
                joining = EngineSet(self.config)
                joining.add(actors, infos)
                have_weights = self.publisher.give(joining)
            with self.engine_set.changing:
                self.lora.bring(actors, infos)
                with self.engine_set.lock:
                    self.engine_set.add(actors, infos, lack_weights=not have_weights)

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
