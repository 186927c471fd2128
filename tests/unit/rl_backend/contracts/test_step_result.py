"""Results of optimizer steps."""

from __future__ import annotations

import pickle

from rl_backend.contracts import StepResult

KNOWN = StepResult(True, 1.5, 3)


def test_a_result_is_used_as_a_tuple() -> None:
    ok, norm, zeros = KNOWN
    assert (ok, norm, zeros) == (True, 1.5, 3) == KNOWN
    assert KNOWN[0] is True and KNOWN[-1] == 3 and len(KNOWN) == 3
    assert StepResult(True, 1.5, 3) == KNOWN and hash(KNOWN) == hash(StepResult(True, 1.5, 3))
    assert StepResult(False, 1.5, 3) != KNOWN
    assert KNOWN != (True, 1.5, 4)
    assert type(pickle.loads(pickle.dumps(KNOWN))) is StepResult
