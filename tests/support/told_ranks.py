"""Stand-ins for what Ray does between a driver and the ranks of a training group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError

from actors.train.order import Driver, OperationLedger
from actors.train.outcome import Failed
from actors.train.ranks import GroupMembers, TrainRanks

FIRST, SECOND = Driver("1", "the first driver"), Driver("2", "the second driver")


class Ref:
    """A reference to an answer: a value, an error to raise, or one that does not come."""

    def __init__(self, answer: Any = None, *, comes: bool = True) -> None:
        self.answer = answer
        self.comes = comes


class ToldRay:
    """``ray.get`` and ``ray.wait`` of :class:`Ref`; what can come has come, the last of the references first.

    Attributes:
        waits: the seconds that were waited for.
    """

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if isinstance(ref.answer, BaseException):
            raise ref.answer
        return ref.answer

    def wait(self, refs: Sequence[Ref], *, num_returns: int, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        assert 0 < num_returns <= len(refs), "Ray refuses other numbers"
        self.waits.append(timeout)
        ready = [ref for ref in reversed(refs) if ref.comes][:num_returns]
        assert ready or timeout is not None, "this would wait for ever"
        return ready, [ref for ref in refs if ref not in ready]


class ToldWorker:
    """One rank. Keeps what it was sent, and asks its own ledger what is asked of rank 0.

    Attributes:
        sent: header, call and loss of each operation.
        asked: name and arguments of every other call.
        answers: a call's name -> what it answers instead: a value, or an error to raise.
        on_execute: called before an operation is taken.
    """

    def __init__(self, owner: Driver = FIRST) -> None:
        self.ledger = OperationLedger(owner)
        self.sent: list[tuple[Any, Any, Any]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.on_execute: Callable[[], None] = lambda: None
        self.execute = SimpleNamespace(remote=self._execute)

    def _execute(self, header: Any, call: Any, loss: Any) -> tuple[Ref, Ref]:
        self.on_execute()
        self.sent.append((header, call, loss))
        return Ref(f"outcome of {call!r}"), Ref(f"stored of {call!r}")

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Ref:
            self.asked.append((method, *arguments))
            if method in self.answers:
                answer = self.answers[method]
                return Ref(answer.pop(0) if isinstance(answer, list) else answer)
            if method == "keep":
                self.ledger.journal.append(*arguments)
                return Ref()
            return Ref(getattr(self.ledger, method)(*arguments))

        return SimpleNamespace(remote=remote)


class Members(GroupMembers):
    """Counts how often its ranks were stopped."""

    killed: int

    def kill(self) -> None:
        object.__setattr__(self, "killed", getattr(self, "killed", 0) + 1)


class ToldGroup:
    """The ranks of one driver."""

    def __init__(self, count: int, ray: ToldRay, driver: Driver = FIRST, *, owned: bool = True) -> None:
        self.ray = ray
        self.workers = [ToldWorker() for _ in range(count)]
        handles: Any = tuple(self.workers)
        placement: Any = None
        self.members = Members("group", "ours", handles, placement, 0.5)
        self.ranks = TrainRanks(self.members, driver, owned=owned)

    @property
    def killed(self) -> int:
        return getattr(self.members, "killed", 0)

    def collect(self, refs: Sequence[Ref], timeout: float | None = None, number: int = 3) -> list[Any]:
        given: Any = refs
        return self.ranks.collect("operation 3 (step)", number, given, timeout)


def told_failure(error: Exception) -> Failed:
    """What a rank answers that raised this."""
    return Failed(error, f"traceback of {error!r}")


def told_death(reason: str) -> ActorUnavailableError:
    """What Ray raises for a rank that is gone."""
    return ActorUnavailableError(reason, None)
