from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from actors.rollout.turn_server import TurnServer


class Answered(dict[int, int]):
    """Each key is gone as soon as it has been looked for: its turn is answered at that moment, by another thread."""

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        return self.pop(key, default)


def test_a_turn_that_is_answered_while_it_is_given_up_holds_up_no_other() -> None:
    given_up: list[Sequence[int]] = []
    server: Any = object.__new__(TurnServer)
    server._keys = Answered({7: 0, 8: 1})
    server._loop = SimpleNamespace(give_up=given_up.append)
    server.give_up_turns([7, 9, 8])
    assert given_up == [[0, 1]]
