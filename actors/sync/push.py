"""Publishing a trainer's weights to rollout engines, over the transport that serves them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from actors.rollout.group.engines import EngineSet, are_on_node, raise_failures
from actors.rollout.group.group import RolloutGroup
from actors.sync.adapter_push import AdapterPush, Canary
from actors.sync.gpu_transports import CudaIpcTransport, NcclTransport, StreamingTransport, devices_of_two
from actors.sync.report import PushClock, PushReport
from actors.sync.source import SourceRanks, layout_of, pinned
from actors.sync.staged_transports import (
    GlooTransport,
    PushPlan,
    SharedMemoryTransport,
    Staged,
    StagedTransport,
    TransportName,
    describe_export,
    make_plan,
)
from actors.train.context import HandleRef
from rl_backend.contracts import (
    UNVERSIONED,
    ConfigError,
    EngineDeadError,
    EngineDirtyError,
    RanksReplacedError,
    RLBackendError,
    TensorInfo,
    TensorTile,
    UnsupportedError,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
)
from rl_backend.contracts.errors import listed
from rl_backend.trace.recorder import span
from rl_backend.weights.tiles import plan_tiles

_CANARY = Canary()

logger = logging.getLogger(__name__)

type Transport = StagedTransport | StreamingTransport


class WeightSync:
    """Publishes the weights of one model, or the adapter of one LoRA tenant, to a rollout group.

    Of a model: from now on the group's engines refuse to sample until the first push. Staging buffers, as large as the
    weights, are kept from one push to the next; :meth:`close` frees them.

    Of a tenant only its factors move, and nothing pauses: the trainer refuses values that are not finite; every engine
    checks names, shapes and ranks, loads the factors beside the version before, and finds what its kernels read to have the
    digest of what was sent. Only then do new requests of the tenant (``RolloutGroup.generate(adapter=...)``) sample with
    the new version, under a name that is never used again; requests that were made before finish on the version before. A
    push of a model loads all adapters again.

    Args:
        train: a ``TrainGroup``, or a :class:`~actors.sync.source.WeightSource`.
        transport: ``auto`` takes CUDA IPC where trainer and engine share a GPU, NCCL where both have one, shared memory on
            one Ray node, else gloo; ``PushReport.transport`` says which. Only ``auto`` for a tenant: shared memory where
            the driver is on that node, too, else Ray's object store.
        byte_budget: largest number of bytes that the export gathers at one time, and of a bucket where weights are streamed;
            holds the largest tensor. Ranks that send what they hold gather nothing.
        changed_only: over ``transport="gloo"``, which must be named: send only elements that differ in any bit from those of
            the push before. Each rank keeps a copy of what it sends in host memory. All is sent in the first push, and where
            ranks or engines have changed.
        merged: push a tenant as a model of its own, base and adapter added up: for engines without adapters, and for what
            they cannot serve as an adapter (experts on a CPU, DoRA). No adapter is served beside such weights.
        directory: of a tenant, on a file system that every node sees: its factors travel through it in peft's format and
            not through memory, with the same checks. The version that is served stays in it.
        canary: of a tenant, checks log-probs with and without the adapter against the trainer's, at the first push to an
            engine and the first after a push of weights. None does not.

    Raises:
        UnsupportedError: ``handle`` is a critic, which no engine can load; or a tenant, and the engines serve no adapters.
        ConfigError: an argument that would have no effect.
    """

    def __init__(
        self,
        train: SourceRanks,
        rollout: RolloutGroup,
        handle: Any = None,
        *,
        transport: TransportName = "auto",
        byte_budget: int | None = None,
        changed_only: bool = False,
        merged: bool = False,
        directory: Path | str | None = None,
        canary: Canary | None = _CANARY,
    ) -> None:
        if isinstance(handle, HandleRef) and handle.head != "log_probs":
            raise UnsupportedError(
                f"model {handle.name!r} has head={handle.head!r}: an engine samples from log-probs; push the policy",
                name=handle.name,
                head=handle.head,
            )
        self._train = train
        # Those of the push that is on its way: what it leaves in their memory is not in that of others.
        self._ranks = pinned(train)
        self._rollout = rollout
        self._handle = handle
        self._byte_budget = byte_budget
        self._key = f"weight_sync_{uuid.uuid4().hex}"
        self._requested = transport
        self._changed_only = changed_only
        self._transport: Transport | None = None if transport == "auto" else self._make_transport()
        self._chosen_for: dict[int, int] = {}
        # The version that engines serve, and weights of it that are still staged for any engine of this host.
        self._served = UNVERSIONED
        self._staged: Staged | None = None
        self._digests: tuple[int, SourceRanks, dict[str, str]] | None = None
        # Tensors, and what workers of engines read of them.
        self._tiled: tuple[tuple[TensorInfo, ...], tuple[TensorTile, ...]] = ((), ())
        self._adapter: AdapterPush | None = None
        is_tenant = isinstance(handle, HandleRef) and handle.lora_id >= 0
        self._merged = handle.name if merged and is_tenant else ""
        if is_tenant and not merged:
            of_models = {"transport": (transport, "auto"), "byte_budget": (byte_budget, None)}
            _refuse("a tenant's factors are one small message", **of_models, changed_only=(changed_only, False))
            self._adapter = AdapterPush(train, rollout, handle, directory=directory, canary=canary)
            return
        why = "it is for a LoRA tenant that is pushed as an adapter"
        _refuse(why, directory=(directory, None), merged=(merged and not is_tenant, False), canary=(canary, _CANARY))
        if changed_only and transport != "gloo":
            why = (
                "needs transport='gloo': in shared memory all is copied sooner than changes are found, and between GPUs no "
                "engine keeps a copy to patch; set transport='gloo', or leave it out"
            )
            raise ConfigError.of("WeightSync.changed_only", changed_only, why)
        rollout.attach_weight_sync()

    def push(self) -> PushReport:
        """Brings every living engine to the trainer's weight version.

        Staged transports verify names, shapes, dtypes, digests and finite values on every engine before any engine loads.
        No engine samples again until all have answered. Of a tenant's versions all engines get the new one, or none.

        Where engines that are lost are replaced (``RolloutConfig.max_restarts``), one that is lost on the way raises
        nothing: the others, or with none left the one that replaces it, are given the weights once more.

        Raises:
            ConfigError: ``byte_budget`` does not hold the largest tensor; nothing was started.
            WeightVersionError: an engine serves newer weights; all serve on.
            WeightCheckError: the weights are not what an engine can load, or are damaged, or the canary of an adapter finds
                other log-probs; all serve on with the old ones.
            EngineDeadError: an engine that is not replaced died during the push, or one was lost too often. Of a tenant the
                others serve the new version.
            EngineDirtyError: an engine that is not replaced failed after its first load; the others serve the new weights.
            WeightSyncError: the transport failed before anything was loaded.
        """
        engines = self._rollout.engine_set
        while True:
            engines.require_hope()
            try:
                with span("push", "push") as traced:
                    report = self._push() if self._adapter is None else self._adapter.push()
                    traced.update(weight_version=report.version, nbytes=report.nbytes, transport=report.transport)
                break
            except (EngineDeadError, EngineDirtyError) as error:
                if not engines.heals:
                    raise
                # Engines took the new weights, or serve the old ones; those that are left by now have them afterwards.
                engines.wait_for_engine(error)
            except RanksReplacedError as error:
                # The ranks that are there now have the same weights, and none of what the others had staged.
                logger.info("the push begins again: %s", error)
        report.export()
        return report

    def give(self, engines: EngineSet) -> bool:
        """Brings engines that join to the weights that were pushed last, checked like those of a push.

        Weights that are staged are taken from there, whatever the trainer is doing. Else the trainer exports its own,
        between two of its operations; where these are another version, False is returned and nothing was done.
        """
        clock = PushClock()
        try:
            if self._verified_again(engines):
                self._load_staged(self._served, engines, clock, joining=True)
                return True
            plan = self._plan()
            transport = self._transport or choose_transport(plan, engines)
            if plan.version != self._served or transport.problem(plan, engines):
                return False
            if isinstance(transport, StreamingTransport):
                self._push_streaming(transport, plan, engines, clock, joining=True)
            else:
                self._push_staged(transport, plan, engines, clock, joining=True)
            if self._transport is None:  # of a sync that is closed
                transport.close(self._ranks, engines)
                self._staged = None
        except (EngineDeadError, EngineDirtyError):
            raise
        except RanksReplacedError:  # those that are there now have the same weights
            return self.give(engines)
        except RLBackendError:  # of the trainer, which may have ended
            return False
        return True

    def _verified_again(self, engines: EngineSet) -> bool:
        staged = self._staged
        if staged is None or staged.manifest.version != self._served:
            return False
        (segment, *_) = staged.segments.values()
        outcomes = engines.call("verify", staged.manifest, segment)
        # Without the rank that owned it, or on another host, there is no such segment.
        if any(isinstance(outcome, WeightSyncError) for outcome in outcomes.values()):
            return False
        raise_failures(outcomes)
        return True

    def _push(self) -> PushReport:
        with self._rollout.pushing:
            return self._push_weights()

    def _push_weights(self) -> PushReport:
        clock = PushClock()
        rollout = self._rollout.engine_set.fixed()
        skipped = tuple(rollout.lost_engines)
        with clock.phase("plan"):
            plan = self._plan()
            clock.version = plan.version
            transport = self._choose(plan, rollout)
            if problem := transport.problem(plan, rollout):
                raise UnsupportedError(f"transport={transport.name!r}: {problem}")
            if self._rollout.last_sync != self._key and isinstance(transport, StreamingTransport):
                transport.reconnect()
            self._rollout.last_sync = self._key
        if isinstance(transport, StreamingTransport):
            engines = self._push_streaming(transport, plan, rollout, clock)
        else:
            engines = self._push_staged(transport, plan, rollout, clock)
        seconds, sent = clock.seconds(), clock.sent
        report = PushReport(plan.version, plan.nbytes, seconds, transport.name, engines, skipped, sent)
        return replace(report, received=clock.received, changed=clock.changed)

    def close(self) -> None:
        """Frees staging buffers and connections; the engines keep their weights, and a later push makes new ones."""
        if self._adapter is not None:
            self._adapter.close()
        if self._transport is not None:
            transport, self._transport, self._chosen_for, self._staged = self._transport, None, {}, None
            transport.close(pinned(self._train), self._rollout.engine_set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except RLBackendError as closing:
            if error is None:
                raise
            error.add_note(f"WeightSync.close() failed as well: {closing}")

    def _make_transport(self) -> Transport:
        return GlooTransport(changed_only=True) if self._changed_only else make_transport(self._requested)

    def _choose(self, plan: PushPlan, rollout: EngineSet) -> Transport:
        if self._requested != "auto":
            self._transport = self._transport or self._make_transport()
            return self._transport
        engines = {engine: rollout.infos[engine].pid for engine in rollout.engines}
        # Again when the engines change: a restarted one may be on another node.
        if self._transport is None or engines != self._chosen_for:
            chosen = choose_transport(plan, rollout)
            if self._transport is None or self._transport.name != chosen.name:
                self.close()
                self._transport = chosen
            self._chosen_for = engines
        return self._transport

    def _plan(self) -> PushPlan:
        dtype = self._rollout.config.dtype
        self._ranks = pinned(self._train)
        results = self._ranks.run_on_ranks(describe_export, self._key, self._handle, dtype, self._byte_budget)
        plan = make_plan(results)
        if not plan.infos:
            raise WeightSyncError("the trainer has no weights to export")
        return plan

    def _require_same_again(self, manifest: WeightManifest) -> None:
        """A version that other ranks have computed again has the weights that it had, where any of them was staged."""
        digests = {str(piece): piece.digest for piece in manifest.pieces}
        before, self._digests = self._digests, (manifest.version, self._ranks, digests)
        if before is None or before[0] != manifest.version or before[1] == self._ranks:
            return
        # In another layout the same weights have other bits.
        if layout_of(before[1]) != layout_of(self._ranks):
            return
        if wrong := [name for name in digests if digests[name] != before[2].get(name)]:
            raise WeightCheckError(
                f"version {manifest.version} of the weights has other values on the ranks that replaced others, "
                f"in {listed(wrong)}; continue from the last checkpoint with resume=auto",
                version=manifest.version,
            )

    def _push_staged(
        self, transport: StagedTransport, plan: PushPlan, rollout: EngineSet, clock: PushClock, *, joining: bool = False
    ) -> tuple[int, ...]:
        self._staged = None
        staged = self._stage(transport, plan, rollout, clock)
        try:
            self._verify(staged, rollout, clock)
        except WeightCheckError as error:
            if staged.changed is None:
                raise
            # Of what an engine has refused it holds nothing, so this time all is sent.
            logger.warning("engines refused what changed since the push before, so all weights are sent: %s", error)
            staged = self._stage(transport, plan, rollout, clock)
            self._verify(staged, rollout, clock)
        if transport.is_kept:
            self._staged = staged
        return self._load_staged(plan.version, rollout, clock, joining=joining)

    def _stage(self, transport: StagedTransport, plan: PushPlan, rollout: EngineSet, clock: PushClock) -> Staged:
        with clock.phase("stage"):
            staged = transport.stage(replace(plan, tiles=self._tiles(plan, rollout)), self._ranks, rollout)
        clock.sent, clock.received, clock.changed = staged.sent, staged.received, staged.changed
        manifest = staged.manifest.replace(kept=plan.kept)
        self._require_same_again(manifest)
        return replace(staged, manifest=manifest)

    def _tiles(self, plan: PushPlan, rollout: EngineSet) -> tuple[TensorTile, ...]:
        """What workers of engines read of the weights; nothing where each engine has only one, which reads all."""
        if rollout.config.tensor_parallel == 1 or not rollout.engines:
            return ()
        if self._tiled[0] != plan.infos:
            # Engines are alike; each of them compares the plan with what its own workers read.
            asked = rollout.call("weight_reads")
            raise_failures(asked)
            self._tiled = plan.infos, plan_tiles(plan.infos, next(iter(asked.values())))
        return self._tiled[1]

    def _verify(self, staged: Staged, rollout: EngineSet, clock: PushClock) -> None:
        with clock.phase("verify"):
            outcomes = rollout.call("verify", staged.manifest, each=lambda engine: (staged.segments[engine], staged.key))
            raise_failures(outcomes)

    def _load_staged(self, version: int, rollout: EngineSet, clock: PushClock, *, joining: bool = False) -> tuple[int, ...]:
        with rollout.updating(), self._turns_paused(rollout, clock) as lost:
            with clock.phase("load"):
                outcomes = lost | rollout.call("load", version)
            with clock.phase("resume"):
                return self._resume(version, outcomes, rollout, joining=joining)

    def _push_streaming(
        self, transport: StreamingTransport, plan: PushPlan, rollout: EngineSet, clock: PushClock, *, joining: bool = False
    ) -> tuple[int, ...]:
        raise_failures(rollout.call("check_manifest", plan.manifest))
        with rollout.updating(), self._turns_paused(rollout, clock) as lost:
            with clock.phase("stream"):
                outcomes = lost | transport.stream(plan, self._ranks, rollout)
            with clock.phase("resume"):
                return self._resume(plan.version, outcomes, rollout, joining=joining)

    @contextmanager
    def _turns_paused(self, rollout: EngineSet, clock: PushClock) -> Iterator[dict[int, RLBackendError]]:
        try:
            with clock.phase("turns"):
                held = rollout.call("pause_turns", timeout=rollout.config.sampling_timeout)
            yield {engine: error for engine, error in held.items() if isinstance(error, RLBackendError)}
        except BaseException:
            # Where no update has begun, engines let turns continue.
            if rollout.engines:
                rollout.call("resume_turns")
            raise

    def _resume(self, version: int, outcomes: dict[int, Any], rollout: EngineSet, *, joining: bool) -> tuple[int, ...]:
        # Every engine has answered: those that loaded serve again, whatever became of the others.
        if not joining:
            self._rollout.lora.base_changed(self._merged)
            self._served, self._rollout.publisher = version, self
        for engine, outcome in outcomes.items():
            rollout.note(engine, outcome)
        resumed = rollout.call("resume") if rollout.engines else {}
        rollout.have_weights(engine for engine, outcome in resumed.items() if not isinstance(outcome, RLBackendError))
        raise_failures(outcomes)
        raise_failures(resumed)
        return tuple(outcomes)


_TRANSPORTS: dict[str, type[Transport]] = {
    "shared_memory": SharedMemoryTransport,
    "gloo": GlooTransport,
    "nccl": NcclTransport,
    "cuda_ipc": CudaIpcTransport,
}


def _refuse(why: str, **options: tuple[Any, Any]) -> None:
    """Raises :class:`~rl_backend.contracts.ConfigError` for options, (value, default), that are not at their default."""
    given = {name: value for name, (value, default) in options.items() if value != default}
    ConfigError.refuse_all((f"WeightSync.{name}", value, f"{why}; leave it out") for name, value in given.items())


def make_transport(name: str) -> Transport:
    if name not in _TRANSPORTS:
        raise ConfigError.of("transport", name, f"expected auto or one of {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name]()


def choose_transport(plan: PushPlan, rollout: EngineSet) -> Transport:
    """CUDA IPC where ranks are on all GPUs of engines, NCCL where each has its own, shared memory on one node, else gloo."""
    infos = [rollout.infos[engine] for engine in rollout.engines]
    if plan.device_ids and all(info.device == "cuda" for info in infos) and rollout.config.py_executable is None:
        if all(set(info.device_ids) <= set(plan.device_ids) for info in infos):
            return make_transport("cuda_ipc")
        if not devices_of_two(plan, rollout):
            return make_transport("nccl")
    # Two Ray nodes on one machine, as containers make them, count as two; shared memory can be asked for by name there.
    return make_transport("shared_memory" if are_on_node(rollout, plan.node_id, plan.host) else "gloo")
