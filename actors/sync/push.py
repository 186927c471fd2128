"""Publishing a trainer's weights to rollout engines, over the transport that serves them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from actors.rollout.group.engines import EngineSet, are_on_node, raise_failures
from actors.rollout.group.group import RolloutGroup
from actors.sync.adapter_push import AdapterPush, Canary
from actors.sync.gpu_transports import CudaIpcTransport, NcclTransport, StreamingTransport, devices_of_two
from actors.sync.report import PushClock, PushReport
from actors.sync.source import SourceRanks, pinned
from actors.sync.staged_transports import (
    GlooTransport,
    PushPlan,
    SharedMemoryTransport,
    StagedTransport,
    TransportName,
    describe_export,
    make_plan,
)
from actors.train.context import HandleRef
from rl_backend.contracts import (
    ConfigError,
    RanksReplacedError,
    RLBackendError,
    UnsupportedError,
    WeightCheckError,
    WeightManifest,
    WeightSyncError,
)
from rl_backend.contracts.errors import listed
from rl_backend.trace.recorder import span

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
            holds the largest tensor.
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
        self._rollout = rollout
        self._handle = handle
        self._byte_budget = byte_budget
        self._key = f"weight_sync_{uuid.uuid4().hex}"
        self._requested = transport
        self._transport: Transport | None = None if transport == "auto" else make_transport(transport)
        self._chosen_for: dict[int, int] = {}
        self._staged: tuple[int, SourceRanks, dict[str, str]] | None = None
        self._adapter: AdapterPush | None = None
        is_tenant = isinstance(handle, HandleRef) and handle.lora_id >= 0
        self._merged = handle.name if merged and is_tenant else ""
        if is_tenant and not merged:
            _refuse(
                "a tenant's factors are one small message", transport=(transport, "auto"), byte_budget=(byte_budget, None)
            )
            self._adapter = AdapterPush(train, rollout, handle, directory=directory, canary=canary)
            return
        why = "it is for a LoRA tenant that is pushed as an adapter"
        _refuse(why, directory=(directory, None), merged=(merged and not is_tenant, False), canary=(canary, _CANARY))
        rollout.attach_weight_sync()

    def push(self) -> PushReport:
        """Brings every living engine to the trainer's weight version.

        Staged transports verify names, shapes, dtypes, digests and finite values on every engine before any engine loads.
        No engine samples again until all have answered. Of a tenant's versions all engines get the new one, or none.

        Raises:
            ConfigError: ``byte_budget`` does not hold the largest tensor; nothing was started.
            WeightVersionError: an engine serves newer weights; all serve on.
            WeightCheckError: the weights are not what an engine can load, or are damaged, or the canary of an adapter finds
                other log-probs; all serve on with the old ones.
            EngineDeadError: an engine died during the push. Of a tenant the others serve the new version.
            EngineDirtyError: an engine failed after its first load and must be restarted; the others serve the new weights.
            WeightSyncError: the transport failed before anything was loaded.
        """
        with span("push", "push") as traced:
            report = self._push_again(self._push if self._adapter is None else self._adapter.push)
            traced.update(weight_version=report.version, nbytes=report.nbytes, transport=report.transport)
        report.export()
        return report

    def _push_again(self, push: Callable[[], PushReport]) -> PushReport:
        while True:
            try:
                return push()
            # The ranks that are there now have the same weights, and none of what the others had staged.
            except RanksReplacedError as error:
                logger.info("the push begins again: %s", error)

    def _require_same_again(self, manifest: WeightManifest, train: SourceRanks) -> None:
        """A version that other ranks have computed again has the weights that it had, where any of them was staged."""
        digests = {info.name: info.digest for info in manifest.tensors}
        if self._staged is not None and self._staged[:2] != (manifest.version, train):
            before, ranks, earlier = self._staged
            wrong = [name for name in digests if digests[name] != earlier.get(name)]
            if before == manifest.version and ranks != train and wrong:
                raise WeightCheckError(
                    f"version {manifest.version} of the weights has other values on the ranks that replaced others, "
                    f"in {listed(wrong)}; continue from the last checkpoint with resume=auto",
                    version=manifest.version,
                )
        self._staged = manifest.version, train, digests

    def _push(self) -> PushReport:
        train, clock = pinned(self._train), PushClock()
        rollout = self._rollout.engine_set.fixed()
        skipped = tuple(rollout.lost_engines)
        with clock.phase("plan"):
            plan = self._plan(train)
            clock.version = plan.version
            transport = self._choose(plan, rollout)
            if problem := transport.problem(plan, rollout):
                raise UnsupportedError(f"transport={transport.name!r}: {problem}")
            if self._rollout.last_sync != self._key and isinstance(transport, StreamingTransport):
                transport.reconnect()
            self._rollout.last_sync = self._key
        if isinstance(transport, StreamingTransport):
            engines = self._push_streaming(transport, plan, train, rollout, clock)
        else:
            engines = self._push_staged(transport, plan, train, rollout, clock)
        return PushReport(plan.version, plan.nbytes, clock.seconds(), transport.name, engines, skipped)

    def close(self) -> None:
        """Frees staging buffers and connections; the engines keep their weights, and a later push makes new ones."""
        if self._adapter is not None:
            self._adapter.close()
        if self._transport is not None:
            transport, self._transport, self._chosen_for = self._transport, None, {}
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

    def _choose(self, plan: PushPlan, rollout: EngineSet) -> Transport:
        if self._requested != "auto":
            self._transport = self._transport or make_transport(self._requested)
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

    def _plan(self, train: SourceRanks) -> PushPlan:
        dtype = self._rollout.config.dtype
        results = train.run_on_ranks(describe_export, self._key, self._handle, dtype, self._byte_budget)
        plan = make_plan(results)
        if not plan.infos:
            raise WeightSyncError("the trainer has no weights to export")
        return plan

    def _push_staged(
        self, transport: StagedTransport, plan: PushPlan, train: SourceRanks, rollout: EngineSet, clock: PushClock
    ) -> tuple[int, ...]:
        with clock.phase("stage"):
            staged = transport.stage(plan, train, rollout)
        with clock.phase("verify"):
            segments, manifest = staged.segments, staged.manifest.replace(kept=plan.kept)
            self._require_same_again(manifest, train)
            raise_failures(rollout.call("verify", manifest, each=lambda engine: (segments[engine], staged.key)))
        with rollout.updating(), self._turns_paused(rollout, clock) as lost:
            with clock.phase("load"):
                outcomes = lost | rollout.call("load", plan.version)
            with clock.phase("resume"):
                return self._resume(outcomes, rollout)

    def _push_streaming(
        self, transport: StreamingTransport, plan: PushPlan, train: SourceRanks, rollout: EngineSet, clock: PushClock
    ) -> tuple[int, ...]:
        raise_failures(rollout.call("check_manifest", plan.manifest))
        with rollout.updating(), self._turns_paused(rollout, clock) as lost:
            with clock.phase("stream"):
                outcomes = lost | transport.stream(plan, train, rollout)
            with clock.phase("resume"):
                return self._resume(outcomes, rollout)

    @contextmanager
    def _turns_paused(self, rollout: EngineSet, clock: PushClock) -> Iterator[dict[int, RLBackendError]]:
        if not self._rollout.turns.asked_for:
            yield {}
            return
        try:
            with clock.phase("turns"):
                held = rollout.call("pause_turns", timeout=rollout.config.sampling_timeout)
            yield {engine: error for engine, error in held.items() if isinstance(error, RLBackendError)}
        except BaseException:
            # Where no update has begun, engines let turns continue.
            if rollout.engines:
                rollout.call("resume_turns")
            raise

    def _resume(self, outcomes: dict[int, Any], rollout: EngineSet) -> tuple[int, ...]:
        # Every engine has answered: those that loaded serve again, whatever became of the others.
        self._rollout.lora.base_changed(self._merged)
        for engine, outcome in outcomes.items():
            rollout.note(engine, outcome)
        resumed = rollout.call("resume") if rollout.engines else {}
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
    """Raises :class:`~rl_backend.contracts.ConfigError` for an option, (value, default), that is not at its default."""
    for name, (value, default) in options.items():
        if value != default:
            raise ConfigError.of(f"WeightSync.{name}", value, f"{why}; leave it out")


def make_transport(name: str) -> Transport:
    if name not in _TRANSPORTS:
        raise ConfigError.of("transport", name, f"expected auto or one of {', '.join(_TRANSPORTS)}")
    return _TRANSPORTS[name]()


def choose_transport(plan: PushPlan, rollout: EngineSet) -> Transport:
    """CUDA IPC where ranks are on all GPUs of engines, NCCL where each has its own, shared memory on one node, else gloo."""
    infos = [rollout.infos[engine] for engine in rollout.engines]
    if plan.device_ids and all(info.device == "cuda" for info in infos):
        if all(set(info.device_ids) <= set(plan.device_ids) for info in infos):
            return make_transport("cuda_ipc")
        if not devices_of_two(plan, rollout):
            return make_transport("nccl")
    # Two Ray nodes on one machine, as containers make them, count as two; shared memory can be asked for by name there.
    return make_transport("shared_memory" if are_on_node(rollout, plan.node_id, plan.host) else "gloo")
