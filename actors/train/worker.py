"""The Ray actor of one training rank: the operations that it runs, and what it reports of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate

import ray
import torch
from ray import cloudpickle

from actors.cluster import prometheus
from actors.cluster.rendezvous import Rendezvous, RendezvousPoint, RendezvousRoute, node_address, use_interface
from actors.train.context import HandleRef, RankContext
from actors.train.loss import LossReceiver, SentLoss
from actors.train.order import Driver, OperationHeader, OperationLedger, OperationSequence
from actors.train.outcome import (
    Apart,
    BuiltModel,
    Completed,
    Failed,
    Outcome,
    RankForward,
    RankInfo,
    TenantForward,
    failed,
    peak_memory,
)
from rl_backend.contracts import HandleError, LossFn, ModelHandle, PackedBatch, RLBackendError
from rl_backend.contracts.atoms import ATOMS, Operation
from rl_backend.contracts.backend_info import OptimizerState
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

    def node_address(self) -> Outcome:
        """Answers this node's address."""
        return Completed(node_address())

    def open_rendezvous(self, address: str) -> Outcome:
        """Opens the store of the ranks, on rank 0; answers the :class:`~actors.cluster.rendezvous.Rendezvous`."""
        try:
            self._rendezvous_point = RendezvousPoint(address, COLLECTIVE_TIMEOUT)
        except OSError as error:
            return failed(error)
        return Completed(self._rendezvous_point.rendezvous)

    def start(self, environment: Mapping[str, str], rendezvous: Rendezvous, pickled_config: bytes) -> Outcome:
        """Sets the rank's environment and builds its runtime; answers a :class:`RankInfo`."""
        try:
            self._path = RendezvousRoute(rendezvous)
            os.environ.update({**environment, **store_environment(self._path.port)})
            use_interface(rendezvous.host)
            torch.set_num_threads(self._threads)
            runtime = create_runtime(cloudpickle.loads(pickled_config))
            self._context = RankContext(runtime, self._group_id, self._rank, self._world_size)
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            return failed(error)
        node_id = ray.get_runtime_context().get_node_id()
        return Completed(RankInfo(self._rank, node_id, node_address(), os.getpid()))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def execute(self, header: OperationHeader, pickled_call: bytes, loss: SentLoss | None) -> tuple[Outcome, Any]:
        """Runs a pickled operation. Answers its outcome, and what an :class:`~actors.train.outcome.Apart` stores."""
        outcome: Outcome
        try:
            self._sequence.start(header)
            if self._context is None:
                raise RLBackendError(f"rank {self._rank} has no runtime; its start failed")
            self._context.operation = header.number
            operation: Operation = cloudpickle.loads(pickled_call)
            loss_fn = None if loss is None else self._losses.receive(loss)
            with _observed(self._context, header, operation):
                outcome = Completed(run(self._context, operation, loss_fn), peak_memory())
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            outcome = failed(error)
        self._sequence.finish(repr(outcome.error) if isinstance(outcome, Failed) else None)
        if isinstance(outcome, Completed) and isinstance(outcome.value, Apart):
            value, stored = outcome.value
            return Completed(Apart(value, None), outcome.peak_memory), stored
        return outcome, None

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def begin(self, driver: Driver, name: str) -> int | Driver:
        """As :meth:`OperationLedger.begin`; asked of rank 0."""
        return self._ledger.begin(driver, name)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def keep(self, operation: Operation) -> None:
        """Adds to :attr:`OperationLedger.journal`; asked of rank 0."""
        self._ledger.journal.append(operation)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def forget(self, key: int) -> None:
        """As :meth:`OperationLedger.forget`; asked of rank 0."""
        self._ledger.forget(key)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def transfer(self, driver: Driver) -> tuple[int, str, Driver, list[Operation]]:
        """As :meth:`OperationLedger.transfer`; asked of rank 0."""
        return self._ledger.transfer(driver)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def progress(self) -> tuple[int, int]:
        """Numbers of the operations that started and finished last."""
        return self._sequence.started, self._sequence.finished

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def take_trace(self, stop: bool = False) -> TraceBatch:
        """As :meth:`~rl_backend.trace.recorder.TraceRecorder.take_batch`."""
        return recorder.take_batch(stop=stop)


def run(context: RankContext, operation: Operation, loss: LossFn | None) -> Any:
    """Runs an operation on this rank, with its arguments as they are; returns what the rank answers.

    Args:
        loss: for an operation that takes one, and its arguments do not hold.
    """
    arguments = dict(operation.arguments)
    if loss is not None:
        arguments["loss_fn"] = loss
    if operation.name in _OWN:
        return _OWN[operation.name](context, **arguments)
    handle = context.handles(arguments.pop("handle"))
    return getattr(context.runtime, operation.name)(handle, **arguments)


def _build_model(context: RankContext, **arguments: Any) -> BuiltModel:
    return _built(context, context.runtime.build_model(**arguments))


def _built(context: RankContext, handle: ModelHandle) -> BuiltModel:
    return BuiltModel(
        key=context.keep(handle),
        name=handle.name,
        data_parallel_rank=handle.data_parallel_rank,
        data_parallel_size=handle.data_parallel_size,
        is_source=context.runtime.is_mp_src_rank_with_outputs(handle),
        micro_batch_multiple=handle.micro_batch_multiple,
        forward_only=handle.forward_only,
        head=handle.head,
        lora_id=handle.lora_id,
    )


def _create_lora_adapter(context: RankContext, handle: HandleRef, **arguments: Any) -> BuiltModel:
    return _built(context, context.runtime.create_lora_adapter(context.handle(handle), **arguments))


def _remove_lora_adapter(context: RankContext, handle: HandleRef) -> None:
    context.runtime.remove_lora_adapter(context.handle(handle))
    context.forget(handle)


def _export_lora_adapter(context: RankContext, handle: HandleRef) -> dict[str, torch.Tensor]:
    """All of it, on the CPU, from rank 0."""
    found = {name: tensor.cpu() for name, tensor in context.runtime.export_lora_adapter(context.handle(handle))}
    return found if context.rank == 0 else {}


def _get_optimizer_state(context: RankContext, handle: HandleRef) -> OptimizerState | None:
    """From rank 0."""
    state = context.runtime.get_optimizer_state(context.handle(handle))
    return state if context.rank == 0 else None


def _forward_backward(
    context: RankContext, handle: HandleRef, data: Sequence[PackedBatch], loss_fn: LossFn | None = None, **arguments: Any
) -> RankForward:
    runtime, model = context.runtime, context.handle(handle)
    # The frozen base of tenants is in evaluation mode while they train.
    evaluates = arguments.get("forward_only") or model.forward_only
    with runtime.eval_mode(model) if evaluates else runtime.train_mode(model):
        result = runtime.forward_backward(model, data, loss_fn, **arguments)
    # A view of a tensor is pickled with all of the tensor, so sequences travel as one.
    outputs = {name: torch.cat(list(rows)).cpu() for name, rows in result.outputs.items()}
    tenants = {
        name: TenantForward(part.lora_id, part.losses, dict(part.metrics), part.error, tuple(part.outputs))
        for name, part in result.tenants.items()
    }
    return RankForward(result.losses, dict(result.metrics), outputs, tenants)


def _run_on_ranks[**P, R](
    context: RankContext,
    function: Callable[Concatenate[RankContext, P], R],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> R:
    return function(context, *args, **kwargs)


def _shutdown(context: RankContext) -> None:
    with ExitStack() as stack:
        stack.callback(context.runtime.close)
        for kept in context.state.values():
            if callable(getattr(kept, "close", None)):
                stack.callback(kept.close)


_OWN: Mapping[str, Callable[..., Any]] = {
    "build_model": _build_model,
    "create_lora_adapter": _create_lora_adapter,
    "remove_lora_adapter": _remove_lora_adapter,
    "export_lora_adapter": _export_lora_adapter,
    "get_optimizer_state": _get_optimizer_state,
    "forward_backward": _forward_backward,
    "weight_version": lambda context, handle: context.handle(handle).weight_version,
    "run_on_ranks": _run_on_ranks,
    "shutdown": _shutdown,
}
"""Operations that are more than a call of the runtime's method of that name."""


@contextmanager
def _observed(context: RankContext, header: OperationHeader, operation: Operation) -> Iterator[None]:
    """Reports the operation that its body runs; models and weight versions are those after it."""
    tags = {"group": context.group_id[:8], "rank": str(context.rank)}
    work = _work(operation)
    started = time.perf_counter()
    with span(header.name, "operation", operation=header.number) as event:
        yield
        event.update(work)
        for name, version in _weight_versions(context, operation).items():
            event.update(model=name, weight_version=version)
            prometheus.set_gauge("rl_backend_rank_weight_version", version, model=name, **tags)
    prometheus.count("rl_backend_operations_total", 1, operation=header.name, **tags)
    seconds = time.perf_counter() - started
    prometheus.count("rl_backend_operation_seconds_total", seconds, operation=header.name, **tags)
    prometheus.count("rl_backend_trained_tokens_total", float(work.get("tokens") or 0), **tags)


def _weight_versions(context: RankContext, operation: Operation) -> dict[str, int]:
    """Of the models that the operation was given."""
    versions = {}
    given = operation.arguments.get("handle")
    for argument in (*(given if isinstance(given, list) else [given]), *operation.arguments.get("args", ())):
        if isinstance(argument, HandleRef):
            try:
                handle = context.handle(argument)
            except HandleError:  # a caller's function may take a reference that means nothing to this group
                continue
            versions[argument.name] = handle.weight_version
    return versions


def _work(operation: Operation) -> dict[str, Argument]:
    """Size of an operation's micro-batches; empty when it has none."""
    if ATOMS[operation.name].split != "sequences":
        return {}
    data = operation.arguments["data"]
    return {
        "micro_batches": len(data),
        "tokens": sum(batch.input_ids.shape[0] for batch in data),
        "sequences": sum(batch.seq_lens.shape[0] for batch in data),
    }


TrainActor = ray.remote(concurrency_groups={CONTROL: 1})(TrainWorker)
