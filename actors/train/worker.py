"""The Ray actor of one training rank: the operations that it runs, and what it reports of them."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray import cloudpickle

from actors.cluster import prometheus
from actors.cluster.processes import offer_stacks, start_time
from actors.cluster.rendezvous import Rendezvous, RendezvousPoint, RendezvousRoute, node_address, use_interface
from actors.train.context import RankContext, RankFunction, refs_in
from actors.train.loss import LossReceiver, SentLoss
from actors.train.order import Driver, OperationHeader, OperationLedger, OperationSequence
from actors.train.outcome import Apart, Completed, Failed, Outcome, RankInfo, failed, peak_memory
from actors.train.passes import forward_backward
from rl_backend.contracts import HandleError, LossFn
from rl_backend.contracts.atoms import Operation
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT, store_environment
from rl_backend.runtime import create_runtime
from rl_backend.trace.recorder import Argument, TraceBatch, recorder, span

CONTROL = "control"
"""Concurrency group of the calls that must answer while an operation runs."""


class TrainWorker:
    """Runs operations one after the other, in one thread. Errors are answered, never raised."""

    def __init__(self, group_id: str, rank: int, world_size: int, threads: int, owner: Driver) -> None:
        self._group_id = group_id
        self._rank = rank
        self._world_size = world_size
        self._threads = threads
        self._ledger = OperationLedger(owner)
        self._sequence = OperationSequence()
        self._losses = LossReceiver()
        self._context: RankContext | None = None
        self._rendezvous_point: RendezvousPoint | None = None
        self._path: RendezvousRoute | None = None

    def locate(self) -> Outcome:
        """A :class:`~actors.train.outcome.RankInfo`."""
        pid = os.getpid()
        node_id = ray.get_runtime_context().get_node_id()
        return Completed(RankInfo(self._rank, node_id, node_address(), pid, start_time(pid)))

    def open_rendezvous(self, address: str) -> Outcome:
        try:
            self._rendezvous_point = RendezvousPoint(address, COLLECTIVE_TIMEOUT)
        except OSError as error:
            return failed(error)
        return Completed(self._rendezvous_point.rendezvous)

    def start(self, environment: Mapping[str, str], rendezvous: Rendezvous, pickled_config: bytes) -> Outcome:
        offer_stacks()
        try:
            self._path = RendezvousRoute(rendezvous)
            os.environ.update({**environment, **store_environment(self._path.port)})
            use_interface(rendezvous.host)
            torch.set_num_threads(self._threads)
            runtime = create_runtime(cloudpickle.loads(pickled_config))
            self._context = RankContext(runtime, self._group_id, self._rank, self._world_size)
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            return failed(error)
        return Completed(None)

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def execute(self, header: OperationHeader, pickled_call: bytes, loss: SentLoss | None) -> tuple[Outcome, Any]:
        """Runs a pickled operation. Answers its outcome, and what an :class:`~actors.train.outcome.Apart` stores."""
        outcome: Outcome
        try:
            self._sequence.start(header)
            assert self._context is not None, "a group whose start failed has ended"
            self._context.operation = header.number
            call: Operation | RankFunction = cloudpickle.loads(pickled_call)
            loss_fn = None if loss is None else self._losses.receive(loss)
            with _observed(self._context, header, call):
                outcome = Completed(run(self._context, call, loss_fn), peak_memory())
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            outcome = failed(error)
        self._sequence.finish(repr(outcome.error) if isinstance(outcome, Failed) else None)
        if isinstance(outcome, Completed) and isinstance(outcome.value, Apart):
            value, stored = outcome.value
            return Completed(Apart(value, None), outcome.peak_memory), stored
        return outcome, None

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def begin(self, driver: Driver, name: str) -> int | Driver:
        """As :meth:`OperationLedger.begin`; this and the next four are asked of rank 0."""
        return self._ledger.begin(driver, name)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def keep(self, operation: Operation) -> None:
        self._ledger.journal.append(operation)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def resume(self, number: int, journal: list[Operation]) -> None:
        self._ledger.resume(number, journal)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def forget(self, key: int) -> None:
        self._ledger.forget(key)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def transfer(self, driver: Driver) -> tuple[int, str, Driver, list[Operation]]:
        return self._ledger.transfer(driver)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def progress(self) -> tuple[int, int]:
        return self._sequence.started, self._sequence.finished

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def take_trace(self, stop: bool = False) -> TraceBatch:
        return recorder.take_batch(stop=stop)


def run(context: RankContext, call: Operation | RankFunction, loss: LossFn | None) -> Any:
    """Runs a call on this rank; ``loss`` is for a function whose arguments do not hold it."""
    if isinstance(call, RankFunction):
        return call.function(context, *call.args, **call.kwargs, **({} if loss is None else {"loss_fn": loss}))
    atom, arguments = call.atom, dict(call.arguments)
    handles = [context.handles(arguments.pop("handle"))] if "handle" in arguments else []
    value = getattr(context.runtime, call.name)(*handles, **arguments)
    if atom.frees:
        context.forget(call.arguments["handle"])
    if atom.builds:
        return context.keep(value)
    return value if atom.join == "any" or context.rank == 0 else None


@contextmanager
def _observed(context: RankContext, header: OperationHeader, call: Operation | RankFunction) -> Iterator[None]:
    tags = {"group": context.group_id[:8], "rank": str(context.rank)}
    work = _work(call)
    started = time.perf_counter()
    with span(header.name, "operation", operation=header.number) as event:
        yield
        event.update(work)
        for name, version in _weight_versions(context, call).items():
            event.update(model=name, weight_version=version)
            prometheus.set_gauge("rl_backend_rank_weight_version", version, model=name, **tags)
    prometheus.count("rl_backend_operations_total", 1, operation=header.name, **tags)
    seconds = time.perf_counter() - started
    prometheus.count("rl_backend_operation_seconds_total", seconds, operation=header.name, **tags)
    prometheus.count("rl_backend_trained_tokens_total", float(work.get("tokens") or 0), **tags)


def _weight_versions(context: RankContext, call: Operation | RankFunction) -> dict[str, int]:
    versions = {}
    for ref in refs_in(call.args if isinstance(call, RankFunction) else call.arguments.values()):
        try:
            versions[ref.name] = context.handle(ref).weight_version
        except HandleError:  # a caller's function may take a reference that means nothing to this group
            continue
    return versions


def _work(call: Operation | RankFunction) -> dict[str, Argument]:
    if not isinstance(call, RankFunction) or call.function is not forward_backward:
        return {}
    _, data = call.args
    return {
        "micro_batches": len(data),
        "tokens": sum(batch.input_ids.shape[0] for batch in data),
        "sequences": sum(batch.seq_lens.shape[0] for batch in data),
    }


TrainActor = ray.remote(concurrency_groups={CONTROL: 1})(TrainWorker)
