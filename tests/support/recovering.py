"""A training group that recovers, with a real runtime in this process as its only rank: no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ray import cloudpickle

from actors.train import recovery
from actors.train.context import RankContext
from actors.train.group import TrainGroup
from actors.train.loss import SentLoss
from actors.train.order import OperationHeader, OperationSequence
from actors.train.outcome import RankInfo
from actors.train.recovery import Recovery
from actors.train.worker import run
from rl_backend.contracts import GroupFailedError
from rl_backend.contracts.atoms import Operation
from tests.support.native import open_runtime

DIES = "dies"


class RankHere:
    """The only rank of a group: an operation runs when it is sent. ``dies`` says in which it dies instead."""

    def __init__(self, context: RankContext, dies: Callable[[OperationHeader], bool], number: int = 0) -> None:
        self.context, self.dies, self.number = context, dies, number
        self.members: Any = SimpleNamespace(id=context.group_id, name="ours", workers=[None], kill=lambda: None)
        self.infos = (RankInfo(0, "here", "127.0.0.1", 1),)
        self.sequence = OperationSequence()
        self.driver, self.bounds, self.peak_memory, self.operator = "driver", None, 0, ""
        self.journal: list[Operation] = []
        self.ran: list[tuple[int, str]] = []
        self.is_dead = self.ended = False

    def dispatch(self, name: str, calls: Sequence[bytes], loss: Any = None) -> Any:
        if self.is_dead:
            raise GroupFailedError("rank 0 died between operations")
        self.number += 1
        header = OperationHeader(self.number, name)
        return header, self._send(header, calls, loss)

    def repeat(self, header: OperationHeader, calls: Sequence[bytes], loss: Any, after: int) -> Any:
        return self._send(OperationHeader(header.number, header.name, after=after), calls, loss)

    def take_place_of(self, lost: RankHere, number: int) -> None:
        self.journal, self.number = list(lost.journal), number

    def _send(self, header: OperationHeader, calls: Sequence[bytes], loss: SentLoss | None) -> Any:
        self.is_dead = self.is_dead or self.dies(header)
        if self.is_dead:
            return [(DIES, None)]
        self.sequence.start(header)
        self.context.operation = header.number
        self.ran.append((header.number, header.name))
        answer: Any
        try:
            call = cloudpickle.loads(calls[0])
            pickled: Any = None if loss is None else loss.pickled[0]
            answer = run(self.context, call, None if pickled is None else cloudpickle.loads(pickled))
        except Exception as error:  # noqa: BLE001, as on a rank
            answer = error
        self.sequence.finish(None)
        return [(answer, None)]

    def collect(self, title: str, number: int, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        if refs[0] is DIES:
            raise GroupFailedError(f"rank 0 died during {title}; {recovery.AFTERWARDS}")
        if isinstance(refs[0], Exception):
            raise refs[0]
        return list(refs)

    def has_answered(self, refs: Sequence[Any]) -> bool:
        return refs[0] is not DIES

    def fail(self, message: str, *, cause: Exception) -> None:
        raise GroupFailedError(message) from cause

    def ready(self, refs: Sequence[Any]) -> bool:
        return True

    def end(self) -> None:
        self.ended = self.is_dead = True

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]


@contextmanager
def group_that_recovers(model: Path, *deaths: int, **settings: Any) -> Iterator[tuple[TrainGroup, list[RankHere]]]:
    """Each number is an operation in which the rank of then dies, in this order; settings are of the runtime."""
    left, started = list(deaths), []
    with ExitStack() as stack:
        stack.enter_context(patch("actors.train.loss.ray.put", lambda loss: loss))  # Ray would start
        stack.enter_context(patch.object(recovery, "_PAUSE_SECONDS", 0.0))

        def dies(header: OperationHeader) -> bool:
            if left and header.number == left[0]:
                return bool(left.pop(0))
            return False

        def start(**_: Any) -> Any:
            runtime = stack.enter_context(open_runtime(model, **settings))
            started.append(RankHere(RankContext(runtime, "group", 0, 1), dies))
            return started[-1]

        first = start()
        yield (
            TrainGroup.__new__(TrainGroup)._over(first.context.runtime.config, first, None, Recovery(first, start)),
            started,
        )
