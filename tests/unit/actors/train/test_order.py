from __future__ import annotations

import pickle

import pytest

from actors.train.order import Driver, OperationHeader, OperationLedger, OperationSequence
from actors.train.outcome import RemoteTraceback, failed, with_origin
from rl_backend.contracts import BatchError, OperationOrderError, RLBackendError

FIRST, SECOND = Driver("1", "the first driver"), Driver("2", "the second driver")


def test_the_ledger_numbers_one_drivers_operations_and_tells_others_who_has_the_group() -> None:
    ledger = OperationLedger(FIRST)
    assert [ledger.begin(FIRST, "a"), ledger.begin(FIRST, "b")] == [1, 2]
    assert ledger.begin(SECOND, "c") == FIRST
    assert ledger.transfer(SECOND) == (2, "b", FIRST, [])
    assert ledger.begin(FIRST, "d") == SECOND
    assert ledger.begin(SECOND, "e") == 3


def test_an_operation_out_of_order_is_refused() -> None:
    sequence = OperationSequence()
    sequence.start(OperationHeader(1, "a"))
    sequence.finish(None)
    for number in (1, 3):
        with pytest.raises(OperationOrderError, match=f"operation {number} .* arrived after operation 1"):
            sequence.start(OperationHeader(number, "b"))
    assert (sequence.started, sequence.finished) == (1, 1)


def test_nothing_runs_after_a_failure_until_the_driver_has_seen_it() -> None:
    sequence = OperationSequence()
    sequence.start(OperationHeader(1, "a"))
    sequence.finish("BatchError('x')")
    for number in (2, 3):
        with pytest.raises(OperationOrderError, match=r"operation 1 before it failed .*: Batch"):
            sequence.start(OperationHeader(number, "b"))
        sequence.finish("OperationOrderError")
    sequence.start(OperationHeader(4, "c", acknowledged=frozenset({1})))
    sequence.finish(None)
    sequence.start(OperationHeader(5, "d", acknowledged=frozenset({1})))
    sequence.finish("BatchError('y')")
    sequence.start(OperationHeader(6, "e", taken_over=5))


def test_a_failure_stops_the_operations_of_its_own_thread_alone() -> None:
    sequence = OperationSequence()
    sequence.start(OperationHeader(1, "a", submitter=1))
    sequence.finish("BatchError('x')")
    sequence.start(OperationHeader(2, "b", submitter=2))
    sequence.finish("BatchError('y')")
    # That the second thread has seen its own failure says nothing about the first's.
    seen = frozenset({2})
    with pytest.raises(OperationOrderError, match="operation 1 before it failed"):
        sequence.start(OperationHeader(3, "c", 1, seen))
    sequence.finish("OperationOrderError")
    sequence.start(OperationHeader(4, "d", 2, seen))
    sequence.finish(None)
    sequence.start(OperationHeader(5, "e", 1, seen | {1}))


def test_an_error_travels_with_its_details_and_gains_the_place_where_it_happened() -> None:
    try:
        raise BatchError("odd", index=3)
    except BatchError as error:
        outcome = pickle.loads(pickle.dumps(failed(error)))
    arrived = with_origin(outcome, 2)
    assert isinstance(arrived, BatchError)
    assert arrived.details["index"] == 3 and arrived.details["rank"] == 2
    assert 'raise BatchError("odd", index=3)' in arrived.details["remote_traceback"]
    assert isinstance(arrived.__cause__, RemoteTraceback)
    assert str(arrived.__cause__).startswith("on rank 2:\nTraceback")
    assert str(pickle.loads(pickle.dumps(arrived.__cause__))) == str(arrived.__cause__)


def test_an_error_that_cannot_be_pickled_travels_as_its_text() -> None:
    class KeywordOnlyError(Exception):
        def __init__(self, *, name: str) -> None:
            super().__init__(name)

    outcome = failed(KeywordOnlyError(name="broken"))
    assert type(outcome.error) is RLBackendError
    assert str(outcome.error) == "KeywordOnlyError: broken"
