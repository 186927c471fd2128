"""One training rank in this process, on a runtime that is a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import cloudpickle

from actors.train import worker
from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.order import Driver, OperationHeader
from rl_backend.contracts import ModelHandle
from rl_backend.contracts.atoms import Operation
from tests.support.plain_handle import PlainHandle


class ToldRuntime:
    """Keeps what it is asked for, and answers what it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    @contextmanager
    def _mode(self, name: str, handle: ModelHandle) -> Iterator[None]:
        self.calls.append((name, handle.name))
        yield
        self.calls.append((f"{name} ends", handle.name))

    def train_mode(self, handle: ModelHandle) -> Any:
        return self._mode("train", handle)

    def eval_mode(self, handle: ModelHandle) -> Any:
        return self._mode("eval", handle)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def ref(key: int, name: str = "policy") -> HandleRef:
    """Names a model of the rank."""
    return HandleRef("group-of-long-id", key, name, False, (0,), (0,))


class ToldRank:
    """A worker of a group of five, with two models: 1 is trained, 2 is forward-only."""

    def __init__(self, rank: int = 0) -> None:
        self.runtime = ToldRuntime()
        runtime: Any = self.runtime
        self.worker = worker.TrainWorker("group-of-long-id", rank, 5, 1, Driver("1", "a driver"))
        self.context = self.worker._context = RankContext(runtime, "group-of-long-id", rank, 5)
        self.trained, self.frozen = PlainHandle("policy", False, 3, 0, 1), PlainHandle("reference", True, 5, 0, 1)
        self.context._handles = {1: self.trained, 2: self.frozen}
        self.number = 0

    def run(self, name: str, **arguments: Any) -> Any:
        return worker.run(self.context, Operation(name, arguments), None)

    def call(self, function: Any, *args: Any, loss: Any = None, **kwargs: Any) -> Any:
        return worker.run(self.context, RankFunction(function, args, kwargs), loss)

    def execute(self, call: Operation | RankFunction, **header: Any) -> tuple[Any, Any]:
        self.number += 1
        name = call.name if isinstance(call, Operation) else call.function.__name__
        given = OperationHeader(self.number, name, **header)
        found: tuple[Any, Any] = self.worker.execute(given, cloudpickle.dumps(call), None)
        return found
