from __future__ import annotations

import pickle
import threading

import pytest

from actors.train.order import Driver, OperationHeader, OperationLedger, OperationSequence, this_thread
from actors.train.outcome import RemoteTraceback, failed, with_origin
from rl_backend.contracts import BatchError, OperationOrderError, RLBackendError
from rl_backend.contracts.atoms import Operation

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


def test_a_journal_loses_what_was_removed_and_is_handed_on_as_a_copy() -> None:
    ledger = OperationLedger(FIRST)
    built = [Operation("build_model", {}, number) for number in (2, 5, 7)]
    ledger.journal.extend(built)
    ledger.forget(5)
    ledger.forget(4)
    _, _, _, handed = ledger.transfer(SECOND)
    assert handed == [built[0], built[2]] == ledger.journal
    handed.clear()
    assert len(ledger.journal) == 2


def test_a_failure_is_the_first_of_its_thread_and_is_told_to_the_driver() -> None:
    sequence = OperationSequence()
    for number, reason in ((1, "first"), (2, None)):
        sequence.start(OperationHeader(number, "a", submitter=number))
        sequence.finish(reason)
    with pytest.raises(OperationOrderError) as caught:
        sequence.start(OperationHeader(3, "b", submitter=1))
    assert caught.value.details == {"number": 3, "failed": 1} and str(caught.value).endswith("not been read: first")
    assert (sequence.started, sequence.finished) == (3, 2)
    sequence.finish("refused")
    with pytest.raises(OperationOrderError) as caught:
        sequence.start(OperationHeader(4, "c", submitter=1, acknowledged=frozenset({3}), taken_over=0))
    assert caught.value.details == {"number": 4, "failed": 1}
    sequence.finish("refused")
    with pytest.raises(OperationOrderError) as caught:
        sequence.start(OperationHeader(6, "d", submitter=2))
    assert caught.value.details == {"number": 6}
    # A new driver knows what happened up to its first operation, and no later failure.
    sequence.start(OperationHeader(5, "e", submitter=1, taken_over=1))
    sequence.finish("second")
    with pytest.raises(OperationOrderError, match="operation 5 before it failed"):
        sequence.start(OperationHeader(6, "f", submitter=1, taken_over=4))


def test_every_thread_has_a_number_of_its_own() -> None:
    here, found = this_thread.number, []
    threads = [threading.Thread(target=lambda: found.append((this_thread.number, this_thread.number))) for _ in range(2)]
    for thread in threads:
        # One after the other: Python may give the second the identity of the first.
        thread.start()
        thread.join()
    assert all(first == second for first, second in found)
    assert len({here, *(first for first, _ in found)}) == 3 and this_thread.number == here > 0


def test_ranks_in_the_place_of_others_go_on_from_their_numbers_with_gaps() -> None:
    ledger = OperationLedger(FIRST)
    built = [Operation("build_model", {}, 4)]
    ledger.resume(17, built)
    assert ledger.transfer(FIRST)[0] == 17 and ledger.begin(FIRST, "a") == 18 and ledger.journal == built
    sequence = OperationSequence()
    sequence.start(OperationHeader(4, "a", after=0))
    sequence.finish(None)
    for after in (0, 3, 8, None):
        with pytest.raises(OperationOrderError, match=r"operation 9 .* arrived after operation 4"):
            sequence.start(OperationHeader(9, "b", after=after))
    sequence.start(OperationHeader(9, "b", after=4))
    sequence.finish(None)
    sequence.start(OperationHeader(10, "c"))
    assert (sequence.started, sequence.finished) == (10, 9)


def test_a_failure_that_is_later_than_what_was_taken_over_or_is_another_s_stays_unseen() -> None:
    sequence = OperationSequence()
    for number, submitter in ((1, 1), (2, 2), (3, 3)):
        sequence.start(OperationHeader(number, "a", submitter=submitter))
        sequence.finish(f"failure {number}")
    sequence.start(OperationHeader(4, "b", submitter=4, taken_over=2))
    sequence.finish(None)
    sequence.start(OperationHeader(5, "c", submitter=2, taken_over=2))
    sequence.finish(None)
    with pytest.raises(OperationOrderError, match="failure 3"):
        sequence.start(OperationHeader(6, "d", submitter=3, taken_over=2))
