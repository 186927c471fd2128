"""The Ray actor of one training rank."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import ray
import torch
from ray import ObjectRef, cloudpickle

from actors.cluster.meeting import Meeting, MeetingPoint, PathToMeeting, node_address, use_interface
from actors.train.atoms import run
from actors.train.context import RankContext
from actors.train.observed import observed
from actors.train.order import Driver, OperationHeader, OperationLedger, OperationSequence
from actors.train.outcome import Completed, Failed, Outcome, failed
from rl_backend.contracts import LossFn, RLBackendError
from rl_backend.contracts.operations import Operation
from rl_backend.parallel.groups import COLLECTIVE_TIMEOUT
from rl_backend.parallel.store import store_environment
from rl_backend.runtime import create_runtime
from rl_backend.trace import TraceBatch, recorder

CONTROL = "control"
"""Concurrency group of the calls that must answer while an operation runs."""

KEPT_LOSSES = 16


@dataclass(frozen=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    node_id: str
    node_ip: str
    pid: int


@dataclass(frozen=True)
class SentLoss:
    """A loss by the digest of its pickle; a rank fetches it once.

    Attributes:
        pickled: one reference, in a list so that Ray does not fetch it with the call.
    """

    digest: str
    pickled: list[ObjectRef]


class TrainWorker:
    """Runs operations one after the other, in one thread. Errors are answered, never raised."""

    def __init__(self, group_id: str, rank: int, world_size: int, threads: int, owner: Driver) -> None:
        self._group_id = group_id
        self._rank = rank
        self._world_size = world_size
        self._threads = threads
        self._ledger = OperationLedger(owner)
        self._sequence = OperationSequence()
        self._losses: OrderedDict[str, LossFn] = OrderedDict()
        self._context: RankContext | None = None
        self._meeting_point: MeetingPoint | None = None
        self._path: PathToMeeting | None = None

    def node_address(self) -> Outcome:
        """Answers this node's address."""
        return Completed(node_address())

    def open_meeting(self, address: str) -> Outcome:
        """Opens the store of the ranks, on rank 0; answers the :class:`~actors.cluster.meeting.Meeting`."""
        try:
            self._meeting_point = MeetingPoint(address, COLLECTIVE_TIMEOUT)
        except OSError as error:
            return failed(error)
        return Completed(self._meeting_point.meeting)

    def start(self, environment: Mapping[str, str], meeting: Meeting, pickled_config: bytes) -> Outcome:
        """Sets the rank's environment and builds its runtime; answers a :class:`RankInfo`."""
        try:
            self._path = PathToMeeting(meeting)
            os.environ.update({**environment, **store_environment(self._path.port)})
            use_interface(meeting.host)
            torch.set_num_threads(self._threads)
            runtime = create_runtime(cloudpickle.loads(pickled_config))
            self._context = RankContext(runtime, self._group_id, self._rank, self._world_size)
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            return failed(error)
        node_id = ray.get_runtime_context().get_node_id()
        return Completed(RankInfo(self._rank, node_id, node_address(), os.getpid()))

    def execute(self, header: OperationHeader, pickled_call: bytes, loss: SentLoss | None) -> Outcome:
        """Runs a pickled :class:`~rl_backend.contracts.operations.Operation`."""
        outcome: Outcome
        try:
            self._sequence.start(header)
            if self._context is None:
                raise RLBackendError(f"rank {self._rank} has no runtime; its start failed")
            self._context.operation = header.number
            operation: Operation = cloudpickle.loads(pickled_call)
            loss_fn = None if loss is None else self._loss(loss)
            with observed(self._context, header, operation):
                outcome = Completed(run(self._context, operation, loss_fn))
        except Exception as error:  # noqa: BLE001, every error is the driver's to judge
            outcome = failed(error)
        self._sequence.finish(repr(outcome.error) if isinstance(outcome, Failed) else None)
        return outcome

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def begin(self, driver: Driver, name: str) -> int | Driver:
        """As :meth:`OperationLedger.begin`; asked of rank 0."""
        return self._ledger.begin(driver, name)

    @ray.method(concurrency_group=CONTROL)  # type: ignore[untyped-decorator]
    def keep(self, operation: Operation) -> None:
        """Adds to :attr:`OperationLedger.journal`; asked of rank 0."""
        self._ledger.journal.append(operation)

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
        """As :meth:`~rl_backend.trace.TraceRecorder.take_batch`."""
        return recorder.take_batch(stop=stop)

    def _loss(self, sent: SentLoss) -> LossFn:
        if sent.digest not in self._losses:
            self._losses[sent.digest] = cloudpickle.loads(ray.get(sent.pickled[0]))
            if len(self._losses) > KEPT_LOSSES:
                self._losses.popitem(last=False)
        self._losses.move_to_end(sent.digest)
        return self._losses[sent.digest]


TrainActor = ray.remote(concurrency_groups={CONTROL: 1})(TrainWorker)
