"""The order of operations: who may operate a training group, and which operation is next."""

from __future__ import annotations

import itertools
import os
import socket
import threading
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
    """Travels with every operation, of which the group's first is number 1.

    Attributes:
        submitter: the driver's thread, by :data:`this_thread`.
        acknowledged: the driver has seen the failures of these operations.
        taken_over: the operations up to this one were another driver's.
        after: the operation that the ranks had before; None for the one of the number before.
    """

    number: int
    name: str
    submitter: int = 0
    acknowledged: frozenset[int] = frozenset()
    taken_over: int = 0
    after: int | None = None


class _Thread(threading.local):
    # Python gives the identity of a thread that has ended to another one.
    def __init__(self) -> None:
        self.number = next(_NUMBERS)


_NUMBERS = itertools.count(1)
this_thread = _Thread()


class OperationLedger:
    """Gives operations their numbers, to one driver at a time. Rank 0 keeps it, outside the thread that trains."""

    def __init__(self, owner: Driver) -> None:
        self._owner = owner
        self._number = 0
        self._name = ""
        # The operations that built models, with their arguments; drivers keep a copy.
        self.journal: list[Operation] = []

    def begin(self, driver: Driver, name: str) -> int | Driver:
        """The number of the driver's next operation, or the driver that owns the group instead."""
        if driver.id != self._owner.id:
            return self._owner
        self._number += 1
        self._name = name
        return self._number

    def resume(self, number: int, journal: list[Operation]) -> None:
        """For ranks in the place of others, whose last operation this was."""
        self._number, self.journal = number, journal

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]

    def transfer(self, driver: Driver) -> tuple[int, str, Driver, list[Operation]]:
        """Makes ``driver`` the owner; returns the last operation's number and name, the owner before, and the journal."""
        previous, self._owner = self._owner, driver
        return self._number, self._name, previous, list(self.journal)


class OperationSequence:
    """One rank's check that operations arrive in order and that none runs after one of its thread that failed unseen."""

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self._submitter = 0
        # Thread of the driver -> number of its operation that failed unseen, and why. What a thread submits builds on what
        # it submitted before; threads that share a group, each with its tenant, do not depend on each other.
        self._failed: dict[int, tuple[int, str]] = {}

    def start(self, header: OperationHeader) -> None:
        """Raises :class:`~rl_backend.contracts.OperationOrderError` when the operation must not run."""
        if self.started != (header.number - 1 if header.after is None else header.after):
            raise OperationOrderError(
                f"operation {header.number} ({header.name}) arrived after operation {self.started}; one in between was lost",
                number=header.number,
            )
        self.started, self._submitter = header.number, header.submitter
        for submitter, (number, _) in list(self._failed.items()):
            if number in header.acknowledged or number <= header.taken_over:
                del self._failed[submitter]
        if header.submitter in self._failed:
            number, reason = self._failed[header.submitter]
            raise OperationOrderError(
                f"operation {header.number} ({header.name}) was not run, because operation {number} before it failed and "
                f"its result had not been read: {reason}",
                number=header.number,
                failed=number,
            )

    def finish(self, failure: str | None) -> None:
        if failure is not None:
            self._failed.setdefault(self._submitter, (self.started, failure))
        self.finished = self.started
