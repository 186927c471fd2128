"""What the updates of a step train on."""

from __future__ import annotations

import pytest

from rl_backend.algorithm.sequences import update_parts
from rl_backend.contracts import BatchError


def test_the_updates_of_a_step_share_what_is_left_of_it() -> None:
    assert [list(part) for part in update_parts(range(16), 2, 4, 1)] == [list(range(4 * i, 4 * i + 4)) for i in range(4)]
    assert [len(part) for part in update_parts(range(10), 2, 4, 1)] == [2, 2, 2, 4]
    assert [len(part) for part in update_parts(range(4), 2, 4, 1)] == [2, 2]
    assert [len(part) for part in update_parts(range(10), 2, 4, 3)] == [4, 6]
    assert [list(part) for part in update_parts(range(2), 2, 4, 3)] == [[0, 1]]
    with pytest.raises(BatchError, match="1 responses are left of a step; an update needs a group of 2"):
        list(update_parts(range(1), 2, 4, 3))
