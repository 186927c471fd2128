"""The end of a training group, on ranks that are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.train.context import HandleRef
from actors.train.group import TrainGroup
from actors.train.layout import Layout
from actors.train.order import Driver, OperationHeader, OperationLedger
from actors.train.ranks import TrainRanks
from actors.train.recovery import Recovery
from rl_backend.contracts import HandleError, OperationOrderError, RLBackendError, RuntimeConfig

MODEL = HandleRef("group", 1, "policy", False, (0,), (0,))
FIRST, SECOND = Driver("1", "the first driver"), Driver("2", "the second driver")


class Ranks(TrainRanks):
    """Of one worker, whose ledger is here and who answers what it is told to."""

    def __init__(self, ledger: OperationLedger) -> None:
        self.killed = 0
        self.sent: list[str] = []
        self.answer: Exception | None = None
        self.timeouts: list[float | None] = []
        worker = SimpleNamespace(execute=SimpleNamespace(remote=self._execute))
        members: Any = SimpleNamespace(id="group", name="ours", workers=[worker], kill=self._kill, failure_grace=0.0)
        super().__init__(members, FIRST, owned=True)
        self._ledger = ledger

    def _execute(self, header: OperationHeader, call: bytes, loss: Any) -> tuple[Any, Any]:
        self.sent.append(header.name)
        return None, None

    def _kill(self) -> None:
        self.killed += 1

    def _control(self, method: str, *arguments: Any) -> Any:
        return getattr(self._ledger, method)(*arguments)

    def collect(self, title: str, number: int, refs: Any, timeout: float | None) -> list[Any]:
        self.timeouts.append(timeout)
        if self.answer is not None:
            raise self.answer
        return [None]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(OperationLedger(FIRST))


@pytest.fixture
def group(ranks: Ranks) -> TrainGroup:
    made = TrainGroup.__new__(TrainGroup)
    config = RuntimeConfig(hf_path="m")
    made._over(config, Recovery(ranks, None, Layout(config, 1)))
    made._finalizer = None
    return made


@pytest.mark.parametrize("told", [True, False])
def test_a_driver_whose_group_another_operates_ends_nothing(group: TrainGroup, ranks: Ranks, told: bool) -> None:
    """Whether it has been told already, or hears of it now."""
    ranks._ledger.transfer(SECOND)
    if told:
        with pytest.raises(OperationOrderError):
            group.weight_version(MODEL)
    for _ in range(2):
        with pytest.raises(OperationOrderError, match="'ours' is operated by the second driver"):
            group.shutdown()
    assert not ranks.killed and not group.ended and not ranks.sent


def test_a_group_ends_once_however_its_ranks_close(group: TrainGroup, ranks: Ranks) -> None:
    group.shutdown(timeout=7.0)
    group.shutdown()
    assert (ranks.sent, ranks.timeouts, ranks.killed) == (["shutdown"], [7.0], 1)
    with pytest.raises(HandleError, match="'ours' was shut down"):
        group.weight_version(MODEL)


@pytest.mark.parametrize(
    ("answer", "raised"), [(TimeoutError("not done"), None), (RLBackendError("a rank failed"), RLBackendError)]
)
def test_ranks_that_do_not_close_are_stopped_all_the_same(
    group: TrainGroup, ranks: Ranks, answer: Exception, raised: type[Exception] | None
) -> None:
    ranks.answer = answer
    if raised is None:
        group.shutdown()
    else:
        with pytest.raises(raised, match="a rank failed"):
            group.shutdown()
    assert ranks.killed == 1 and group.ended
