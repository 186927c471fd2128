"""Weights between GPUs, over NCCL or CUDA IPC, on vLLM's own transfer engines. Has not been run: needs CUDA.

- ``nccl``: the source rank and every worker of every engine form one NCCL group; buckets of ``byte_budget`` bytes, and the
  tensor that fills them, are packed, broadcast, checked and loaded; two are under way at a time. An engine that dies or
  receives no more ends the broadcast. A rank that dies leaves the engines waiting in NCCL, as in any NCCL job.
- ``cuda_ipc``: for colocated training, where every GPU of every engine also has a training rank. Each rank packs buckets
  into one buffer on its GPU; the engine's worker on that GPU maps it, checks and loads it.

vLLM's trainer-side engine runs on every rank and sends from rank 0. It reads the weights from vLLM's kind of weight source
and tells the engines what to do through a client; here the source is the runtime's export, and the client calls the rollout
engines' Ray actors. Beginning and finishing an update belong to the driver, which waits for every engine.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import ray
import torch
from torch import Tensor

from actors.cluster.rendezvous import with_free_port
from actors.rollout.group.engines import EngineSet
from actors.sync.source import SourceContext, SourceRanks
from actors.sync.staged_transports import SOURCE_RANK, PushPlan, Transport, export, from_source
from rl_backend.contracts import (
    GroupFailedError,
    HandleError,
    RLBackendError,
    WeightSyncError,
    dtype_from_name,
)
from rl_backend.weights.inspection import device_checksum
from rl_backend.weights.staging import as_announced

DEFAULT_BYTE_BUDGET = 2**30
"""Bytes of a bucket when the weight sync has no ``byte_budget``; more where a tensor is larger."""
# How long an engine may take to join a transfer, or to load what was sent to it.
ANSWER_SECONDS = 600.0


class StreamingTransport(Transport):
    """Loads the weights bucket by bucket as vLLM's trainer-side engine sends them; each is verified before it is loaded."""

    # Whether an engine may wait for ever for a sender that failed, so its process must be ended.
    kills_abandoned = False

    def __init__(self) -> None:
        self._members: dict[int, int] = {}
        self._source: SourceRanks | None = None
        self._key = ""

    def problem(self, plan: PushPlan, rollout: EngineSet) -> str:
        on_cpu = [rollout.infos[engine].name for engine in rollout.engines if rollout.infos[engine].device != "cuda"]
        if not plan.device_ids:
            on_cpu.insert(0, "the training group")
        if on_cpu:
            return (
                f"moves weights between CUDA devices, but {', '.join(on_cpu)} has none; use transport='shared_memory' on "
                "one host or 'gloo' across hosts"
            )
        if rollout.config.py_executable is not None:
            return (
                "is vLLM's on both sides, and RolloutConfig.py_executable gives engines another environment; use "
                "transport='shared_memory' on one host or 'gloo' across hosts"
            )
        return self.problem_of_gpus(plan, rollout)

    @abstractmethod
    def problem_of_gpus(self, plan: PushPlan, rollout: EngineSet) -> str:
        """As :meth:`problem`, where all are on CUDA."""

    def reconnect(self) -> None:
        """Another push has reached the engines since: they receive from that one, until :meth:`connect`."""
        self._members = {}

    def connect(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> None:
        members = {engine: rollout.infos[engine].pid for engine in rollout.engines}
        if members == self._members and train == self._source:
            return
        self._key = plan.key
        client = EngineClient(self.name, rollout.actors(), rollout.config.tensor_parallel)
        train.run_on_ranks(open_stream, plan, client)
        self._members, self._source = members, train

    def stream(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> dict[int, Any]:
        """Updates every engine from ``begin_update`` to ``finish_update``; each engine's outcome.

        An engine whose update began and did not end is dirty, even when the trainer or another engine failed.
        """
        self.connect(plan, train, rollout)
        began = rollout.call("begin_update")
        failed = {engine: outcome for engine, outcome in began.items() if isinstance(outcome, RLBackendError)}
        begun = [engine for engine in began if engine not in failed]
        if failed:
            reason = f"another engine could not begin: {next(iter(failed.values()))}"
            return {**failed, **rollout.abandon(begun, reason, kill=False)}
        try:
            last_message = self.send(plan, train, rollout)
        except BaseException as error:
            rollout.abandon(begun, f"the trainer failed: {type(error).__name__}: {error}", kill=self.kills_abandoned)
            raise
        confirmed = rollout.call("update", last_message)
        finished = rollout.call("finish_update", plan.version) if rollout.engines else {}
        outcomes: dict[int, Any] = {}
        for engine, outcome in confirmed.items():
            # The first error is why a later step failed too.
            errors = [each for each in (outcome, finished.get(engine)) if isinstance(each, RLBackendError)]
            outcomes[engine] = errors[0] if errors else None
        return outcomes

    def send(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> dict[str, Any]:
        """Sends all weights; returns the last message for every engine's ``update``, by which it confirms them."""
        try:
            return {"checksums": from_source(train.run_on_ranks(send_stream, plan))}
        except BaseException:
            self._members = {}
            raise

    def close(self, train: SourceRanks, rollout: EngineSet) -> None:
        if self._key:
            key, self._key, self._members = self._key, "", {}
            # A training group that has ended keeps nothing.
            with suppress(GroupFailedError, HandleError):
                train.run_on_ranks(close_stream, key)


@dataclass
class EngineClient:
    """vLLM's ``VLLMWeightSyncClient`` over the actors of a rollout group.

    Attributes:
        actors: in the order of their ranks in the transfer group.
        workers: processes of one engine.
        stop_sending: ends a send that waits for engines; set where the sender can wait for ever.
    """

    kind: str
    actors: list[Any]
    workers: int
    stop_sending: Callable[[], None] | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        calls = []
        for position, actor in enumerate(self.actors):
            settings = {"kind": self.kind, **init_info}
            if "rank_offset" in settings:
                settings["rank_offset"] += position * self.workers
            calls.append(actor.init_transfer.remote(settings))
        done, hanging = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_SECONDS)
        if hanging:
            raise _no_answer(self.kind, len(hanging), "joined the transfer")
        ray.get(done)

    def start_weight_update(self) -> None:
        """Every engine has begun already."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # A failed engine keeps its error for the driver, which asks every engine at the end of the push; but it receives
        # nothing more, for which a sender must not wait.
        waiting, deadline = [actor.update.remote(update_info) for actor in self.actors], time.monotonic() + ANSWER_SECONDS
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not done:
                    raise _no_answer(self.kind, len(waiting), "answered the update")
                if self.stop_sending is not None:
                    ray.get(done)
        except BaseException:
            if self.stop_sending is not None:
                self.stop_sending()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The driver finishes when every engine has confirmed its checksums."""


@dataclass
class ExportSource:
    """vLLM's ``WeightSource`` to 0.32 over a runtime's export; keeps the checksum of every tensor that it yields."""

    context: SourceContext
    plan: PushPlan
    checksums: dict[str, Tensor] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(info.name, dtype_from_name(info.dtype), info.shape) for info in self.plan.infos]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.checksums, stream = {}, _present_stream()
        # Engines expect what the plan says: an export that differs from it ends the push.
        for info, tensor in as_announced(self.plan.infos, export(self.context, self.plan)):
            # vLLM packs several tensors before it sends them, the export may reuse one for the next. It sends from a device.
            device = tensor.device if stream is None else stream.device
            whole = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            if self.context.rank == SOURCE_RANK:
                self.checksums[info.name] = device_checksum(whole)
            yield info.name, whole
            before, stream = stream, _present_stream()
            if before is not None and stream != before:
                # vLLM asks for a bucket's tensors on one stream and for the next bucket's on another, and what the export
                # has begun on the one, such as a gather of several tensors, it goes on with on the other.
                before.synchronize()


def as_vllm_drives_it(source: ExportSource) -> Any:
    """The source for the vLLM that is installed: from 0.33 it reads ``metadata`` once and asks for ``iter_full``."""
    from vllm.distributed.weight_transfer import base

    if not hasattr(base.WeightSource, "iter_full"):
        return source

    class FullTensors(base.WeightSource):
        @cached_property
        def metadata(self) -> list[Any]:
            return source.metadata()

        def iter_full(self) -> Iterator[tuple[str, Tensor]]:
            return iter(source)

    return FullTensors()


@dataclass(frozen=True)
class Stream:
    """What a rank keeps of a connection."""

    engine: Any
    source: ExportSource


def _present_stream() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _no_answer(transport: str, engines: int, what: str) -> WeightSyncError:
    return WeightSyncError(
        f"transport={transport!r}: {engines} engines have not {what} for {ANSWER_SECONDS:g} s; restart them and push again",
        transport=transport,
    )


def open_stream(context: SourceContext, plan: PushPlan, client: EngineClient) -> None:
    """Runs on every rank: makes vLLM's trainer-side engine, in place of the one of an earlier connection."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    close_stream(context, plan.key)
    # A tensor travels in one bucket.
    budget = max(plan.byte_budget or DEFAULT_BYTE_BUDGET, *(info.nbytes for info in plan.infos))
    source = ExportSource(context, plan)
    driven = as_vllm_drives_it(source)

    def open_nccl(port: int) -> Any:
        size = 1 + len(client.actors) * client.workers
        init_info = NCCLTrainerInitInfo(
            master_address=host, master_port=port, world_size=size, packed_buffer_size_bytes=budget, rank=context.rank
        )
        return WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=driven)

    if client.kind == "nccl":
        host = ray.util.get_node_ip_address()
        engine = with_free_port(host, open_nccl)
        client.stop_sending = partial(end_group, engine)
    else:
        init_info = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=budget, rank=context.rank)
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=driven)
    context.state[plan.key] = Stream(engine, source)


def send_stream(context: SourceContext, plan: PushPlan) -> dict[str, int]:
    """Runs on every rank, a collective: sends, and returns the source rank's checksums."""
    stream: Stream = context.state[plan.key]
    stream.source.plan = plan
    # vLLM reads the weights in its own streams, which do not wait for what this one still writes of them.
    torch.cuda.current_stream().synchronize()
    stream.engine.send_weights()
    return {name: int(checksum) for name, checksum in stream.source.checksums.items()}


def close_stream(context: SourceContext, key: str) -> None:
    stream: Stream | None = context.state.pop(key, None)
    if stream is not None:
        end_group(stream.engine)
        stream.engine.shutdown()


def end_group(engine: Any) -> None:
    # It would else keep memory of the GPU until its process ends.
    group = getattr(engine, "model_update_group", None)
    if group is not None:
        # vLLM 0.32 would destroy it again.
        engine.model_update_group = None
        group.destroy()


class NcclTransport(StreamingTransport):
    name = "nccl"
    kills_abandoned = True

    def problem_of_gpus(self, plan: PushPlan, rollout: EngineSet) -> str:
        for device, members in devices_of_two(plan, rollout).items():
            return (
                f"{' and '.join(members)} share the GPU {device}, which members of an NCCL group cannot; use "
                "transport='cuda_ipc' where every engine shares GPUs with training ranks, else 'shared_memory' on one host "
                "or 'gloo'"
            )
        return ""


def devices_of_two(plan: PushPlan, rollout: EngineSet) -> dict[str, list[str]]:
    """UUIDs of GPUs that more than one member of the transfer group has -> the members: the source rank and the engines."""
    members: dict[str, list[str]] = {plan.device_ids[SOURCE_RANK]: [f"rank {SOURCE_RANK} of the training group"]}
    for engine in rollout.engines:
        info = rollout.infos[engine]
        for device in info.device_ids:
            members.setdefault(device, []).append(info.name)
    return {device: names for device, names in members.items() if len(names) > 1}


class CudaIpcTransport(StreamingTransport):
    name = "cuda_ipc"

    def problem_of_gpus(self, plan: PushPlan, rollout: EngineSet) -> str:
        for engine in rollout.engines:
            info = rollout.infos[engine]
            if missing := ", ".join(sorted(set(info.device_ids) - set(plan.device_ids))):
                return f"{info.name} uses GPUs without a training rank ({missing}); use transport='nccl'"
        return ""
