"""Results of optimizer steps, also of those that are not known yet."""

from __future__ import annotations

import copy
import pickle

import pytest

from rl_backend.contracts import PendingStepResult, StepResult

KNOWN = StepResult(True, 1.5, 3)


def test_a_result_is_used_as_a_tuple() -> None:
    ok, norm, zeros = KNOWN
    assert (ok, norm, zeros) == (True, 1.5, 3) == KNOWN
    assert KNOWN[0] is True and KNOWN[-1] == 3 and len(KNOWN) == 3
    assert StepResult(True, 1.5, 3) == KNOWN and hash(KNOWN) == hash(StepResult(True, 1.5, 3))
    assert StepResult(False, 1.5, 3) != KNOWN
    assert KNOWN != (True, 1.5, 4)


@pytest.mark.parametrize(
    "look",
    [
        lambda result: result.ok,
        lambda result: result.num_zeros,
        tuple,
        repr,
        hash,
        pickle.dumps,
        copy.copy,
        lambda result: result == KNOWN,
    ],
)
def test_a_pending_result_is_waited_for_once_when_it_is_first_looked_at(look) -> None:  # type: ignore[no-untyped-def]
    waits: list[None] = []

    def wait() -> StepResult:
        waits.append(None)
        return KNOWN

    result = PendingStepResult(wait)
    assert isinstance(result, StepResult) and not waits
    look(result)
    assert len(waits) == 1
    assert tuple(result) == tuple(KNOWN) and result == KNOWN and len(waits) == 1


def test_a_pending_result_travels_as_a_known_one() -> None:
    assert type(pickle.loads(pickle.dumps(PendingStepResult(lambda: KNOWN)))) is StepResult


def test_a_step_that_cannot_be_waited_for_says_so_each_time() -> None:
    def wait() -> StepResult:
        raise RuntimeError("connection closed")

    result = PendingStepResult(wait)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            _ = result.ok
    with pytest.raises(AttributeError, match="loss"):
        _ = result.loss
