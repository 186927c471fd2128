"""The order of operations: who may operate a training group, and which operation is next."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass

import ray

from rl_backend.contracts import OperationOrderError
from rl_backend.contracts.atoms import Operation


@dataclass(frozen=True)
class Driver:
    """One group object in one process."""

    id: str
    description: str

    @classmethod
    def here(cls) -> Driver:
        """A new driver in this process; a process may hold several copies of a group, each a driver."""
        id_ = uuid.uuid4().hex
        job = ray.get_runtime_context().get_job_id()
        return cls(id_, f"copy {id_[:6]} in process {os.getpid()} on {socket.gethostname()} (Ray job {job})")


@dataclass(frozen=True)
class OperationHeader:
    """Travels with every operation.

    Attributes:
        number: 1 for the group's first.
        acknowledged: the driver has seen the failure of every operation up to this one.
    """

    number: int
    name: str
    acknowledged: int


class OperationLedger:
    """Gives operations their numbers, to one driver at a time. Rank 0 keeps it, outside the thread that trains.

    Attributes:
        journal: the operations that built models, with their arguments; drivers keep a copy.
    """

    def __init__(self, owner: Driver) -> None:
        self._owner = owner
        self._number = 0
        self._name = ""
        self.journal: list[Operation] = []

    def begin(self, driver: Driver, name: str) -> int | Driver:
        """The number of the driver's next operation, or the driver that owns the group instead."""
        if driver.id != self._owner.id:
            return self._owner
        self._number += 1
        self._name = name
        return self._number

    def forget(self, key: int) -> None:
        """Takes the operation that built the model of this key out of the journal."""
        self.journal = [each for each in self.journal if each.number != key]

    def transfer(self, driver: Driver) -> tuple[int, str, Driver, list[Operation]]:
        """Makes ``driver`` the owner; returns the last operation's number and name, the owner before, and the journal."""
        previous, self._owner = self._owner, driver
        return self._number, self._name, previous, list(self.journal)


class OperationSequence:
    """One rank's check that operations arrive in order and that none runs after one that failed unseen."""

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self._failed: tuple[int, str] | None = None

    def start(self, header: OperationHeader) -> None:
        """Raises :class:`~rl_backend.contracts.OperationOrderError` when the operation must not run."""
        if header.number != self.started + 1:
            raise OperationOrderError(
                f"operation {header.number} ({header.name}) arrived after operation {self.started}; one in between was lost",
                number=header.number,
            )
        self.started = header.number
        if self._failed is not None and header.acknowledged < self._failed[0]:
            number, reason = self._failed
            raise OperationOrderError(
                f"operation {header.number} ({header.name}) was not run, because operation {number} before it failed and "
                f"its result had not been read: {reason}",
                number=header.number,
                failed=number,
            )
        self._failed = None

    def finish(self, failure: str | None) -> None:
        """Ends the operation that started last."""
        if failure is not None and self._failed is None:
            self._failed = (self.started, failure)
        self.finished = self.started
