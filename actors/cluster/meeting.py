"""Where the processes of a group meet: a store on the loopback address, behind a gate where some are on other machines."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.cluster.gate import Doorway, Gate
from rl_backend.parallel.store import LOOPBACK, host_store


@dataclass(frozen=True)
class Meeting:
    """How to get to a :class:`MeetingPoint`. Travels over Ray alone, for who has it is let in.

    Attributes:
        host: the loopback address where all members are on one machine, else the host's node's.
        secret: that the gate asks for; empty without a gate.
    """

    host: str
    port: int
    secret: bytes = field(default=b"", repr=False)

    @property
    def on_one_machine(self) -> bool:
        """Whether all members are."""
        return self.host == LOOPBACK


class MeetingPoint:
    """A store of this process, for members that have its :attr:`meeting`.

    Args:
        address: as :func:`~actors.cluster.network.meeting_address` has it.
        timeout: how long this process waits for a key of the store.
    """

    def __init__(self, address: str, timeout: timedelta) -> None:
        self.store: TCPStore = host_store(timeout)
        self._gate: Gate | None = None
        self.meeting = Meeting(LOOPBACK, self.store.port)
        if address != LOOPBACK:
            secret = secrets.token_bytes(32)
            self._gate = Gate(address, (LOOPBACK, self.store.port), secret)
            self.meeting = Meeting(address, self._gate.port, secret)

    def close(self) -> None:
        """Lets nobody else in."""
        if self._gate is not None:
            self._gate.close()


class PathToMeeting:
    """This process's way to a meeting point.

    Attributes:
        port: of the loopback address, where the store answers.

    Raises:
        RLBackendError: the meeting point does not answer, or has another secret.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._doorway = None if meeting.on_one_machine else Doorway(LOOPBACK, (meeting.host, meeting.port), meeting.secret)
        self.port = meeting.port if self._doorway is None else self._doorway.port

    def close(self) -> None:
        """Opens no more connections; those that are open stay."""
        if self._doorway is not None:
            self._doorway.close()
