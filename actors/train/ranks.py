"""The actors of a training group as one driver sees them: numbered dispatch, and what happens when a rank fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster.ray_watch import ray_is_usable
from actors.train.loss import SentLoss
from actors.train.order import Driver, OperationHeader, this_thread
from actors.train.outcome import Completed, Failed, RankInfo, breaks_process_group, with_origin
from rl_backend.contracts import GroupFailedError, HandleError, OperationOrderError, RLBackendError
from rl_backend.contracts.atoms import Operation

POLL_SECONDS = 0.02
LEDGER_TIMEOUT_SECONDS = 30.0
AFTERWARDS = "all ranks were stopped: build a new group and load the last checkpoint"


@dataclass(frozen=True)
class GroupMembers:
    """What every copy of a group shares."""

    id: str
    name: str
    workers: tuple[ActorHandle, ...]
    placement_group: PlacementGroup
    failure_grace: float

    def kill(self) -> None:
        """Ends every rank and gives its resources back. Does nothing once Ray is shut down or lost, which did the same."""
        if ray_is_usable():
            for worker in self.workers:
                ray.kill(worker)
            remove_placement_group(self.placement_group)


class TrainRanks:
    """One driver's access to the members.

    Args:
        owned: whether this driver is the one that rank 0's ledger lets operate.

    Attributes:
        operator: who operates the group, to this driver's knowledge; for messages.
        journal: the operations that built the group's models, to this driver's knowledge.
        peak_memory: bytes, of the rank that has held most; as of the last results that this driver has read.
    """

    def __init__(self, members: GroupMembers, driver: Driver, *, owned: bool) -> None:
        self.members = members
        self.driver = driver
        self.infos: tuple[RankInfo, ...] = ()
        self._owned = owned
        self.operator = driver.description
        self.journal: list[Operation] = []
        self.peak_memory = 0
        self._acknowledged = frozenset[int]()
        self._taken_over = 0
        self._lock = threading.RLock()
        self._ended: RLBackendError | None = None

    @property
    def ended(self) -> bool:
        """Whether the group failed or was shut down, to this driver's knowledge."""
        return self._ended is not None

    def dispatch(
        self, name: str, pickled_calls: Sequence[bytes], loss: SentLoss | None = None
    ) -> tuple[OperationHeader, list[tuple[ray.ObjectRef, ray.ObjectRef]]]:
        """Starts the next operation: call r on rank r. Of each rank its outcome, and what it leaves in the object store."""
        with self._lock:
            self.check_usable()
            try:
                number = self._control("begin", self.driver, name)
                if isinstance(number, Driver):
                    self._owned, self.operator = False, number.description
                    raise self._not_owner()
                header = OperationHeader(number, name, this_thread.number, self._acknowledged, self._taken_over)
                refs = [
                    worker.execute.remote(header, call, loss)
                    for worker, call in zip(self.members.workers, pickled_calls, strict=True)
                ]
            except RLBackendError:
                raise
            except BaseException as error:
                # A number that some ranks never see would have every later operation refused, or wait for them.
                with suppress(GroupFailedError):
                    self.fail(
                        f"{type(error).__name__} interrupted the start of {name}, which not all ranks may have received"
                    )
                raise
            return header, refs

    def collect(self, title: str, number: int, refs: Sequence[ray.ObjectRef], timeout: float | None) -> list[Any]:
        """One value per rank; raises as :meth:`~actors.train.future.GroupFuture.result`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        pending = list(refs)
        values: dict[int, Any] = {}
        failures: dict[int, Failed] = {}
        while pending:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=wait)
            if not ready:
                if failures:
                    self._stop_peers(title, failures, [rank_of[ref] for ref in pending])
                raise TimeoutError(f"{title} of training group {self.members.name!r} is not done after {timeout:g} s")
            outcome = self._outcome(title, rank_of[ready[0]], ready[0], pending, rank_of, failures)
            if isinstance(outcome, Completed):
                values[rank_of[ready[0]]] = outcome.value
                self.peak_memory = max(self.peak_memory, outcome.peak_memory)
            else:
                if not failures:
                    deadline = time.monotonic() + self.members.failure_grace
                failures[rank_of[ready[0]]] = outcome
        if failures:
            self._raise(title, number, failures)
        return [values[rank] for rank in range(len(refs))]

    def ready(self, refs: Sequence[ray.ObjectRef]) -> bool:
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return len(done) == len(refs)

    def keep(self, operation: Operation) -> None:
        """Adds to the journal, here, for when the ranks are lost, and on rank 0, for a driver that takes over."""
        self.journal.append(operation)
        self._control("keep", operation)

    def forget(self, key: int) -> None:
        """Takes what built the model of this key out of the journal."""
        self.journal = [each for each in self.journal if each.number != key]
        self._control("forget", key)

    def take_over(self, timeout: float) -> None:
        """Makes this driver the owner once the operations of the one before are finished on every rank."""
        with self._lock:
            self._check_alive()
            number, name, previous, self.journal = self._control("transfer", self.driver)
            deadline = time.monotonic() + timeout
            while True:
                progress = self._all("progress")
                if all(finished >= number for _, finished in progress):
                    break
                if time.monotonic() > deadline:
                    lost = [rank for rank, (started, _) in enumerate(progress) if started < number]
                    running = [rank for rank, (started, done) in enumerate(progress) if started >= number > done]
                    raise OperationOrderError(
                        f"operation {number} ({name}) of {previous.description} is not finished after {timeout:g} s: it "
                        f"runs on ranks {running} and has not arrived on ranks {lost}; call take_over() again, or build a "
                        "new group if that driver is gone",
                        number=number,
                        running=running,
                        not_arrived=lost,
                    )
                time.sleep(POLL_SECONDS)
            self._owned, self.operator, self._taken_over = True, self.driver.description, number

    def check_usable(self) -> None:
        """Raises when the group has ended, or another driver operates it."""
        self._check_alive()
        if not self._owned:
            raise self._not_owner()

    def end(self) -> None:
        """Frees the actors and their resources."""
        with self._lock:
            if self._ended is None:
                self._ended = HandleError(f"training group {self.members.name!r} was shut down")
            self.members.kill()

    def fail(self, message: str, *, cause: Exception | None = None, **details: Any) -> NoReturn:
        """Stops every rank and raises :class:`~rl_backend.contracts.GroupFailedError`, now and at every later call."""
        error = GroupFailedError(f"training group {self.members.name!r}: {message}; {AFTERWARDS}", **details)
        if self._ended is None:
            self._ended = error
            self.members.kill()
        raise error from cause

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(self._ended.message, **self._ended.details)

    def _not_owner(self) -> OperationOrderError:
        return OperationOrderError(
            f"training group {self.members.name!r} is operated by {self.operator}, and this is "
            f"{self.driver.description}; call take_over() on this copy to operate it from here",
            owner=self.operator,
        )

    def _control(self, method: str, *arguments: Any) -> Any:
        ref = getattr(self.members.workers[0], method).remote(*arguments)
        return self._answers([ref])[0]

    def _all(self, method: str) -> list[Any]:
        return self._answers([getattr(worker, method).remote() for worker in self.members.workers])

    def _answers(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        answers = []
        for rank, ref in enumerate(refs):
            try:
                answers.append(ray.get(ref, timeout=LEDGER_TIMEOUT_SECONDS))
            except GetTimeoutError:
                self.fail(f"rank {rank} does not answer", ranks=[rank])
            except RayError as error:
                self._rank_died("between operations", {rank: error})
        return answers

    def _outcome(
        self,
        title: str,
        rank: int,
        ref: ray.ObjectRef,
        pending: Sequence[ray.ObjectRef],
        rank_of: Mapping[ray.ObjectRef, int],
        failures: Mapping[int, Failed],
    ) -> Completed | Failed:
        try:
            return ray.get(ref)  # type: ignore[no-any-return]
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error.cause))
            return Failed(cause, str(error))
        except (ActorDiedError, ActorUnavailableError) as error:
            died: dict[int, Exception] = {rank: error}
            more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0) if pending else ([], [])
            for other in more:
                try:
                    ray.get(other)
                except (ActorDiedError, ActorUnavailableError) as other_error:
                    died[rank_of[other]] = other_error
                except RayError:
                    continue
            first = next(iter(failures.items()), None)
            self._rank_died(f"during {title}", died, first)
        except RayError as error:
            return Failed(error, str(error))

    def _rank_died(self, when: str, died: Mapping[int, Exception], first: tuple[int, Failed] | None = None) -> NoReturn:
        ranks = sorted(died)
        places = [f"process {info.pid} on {info.node_ip}" for info in self.infos if info.rank in died]
        where = f" ({', '.join(places)})" if places else ""
        seen = f"; rank {first[0]} reported {first[1].error!r}" if first else ""
        reason = " ".join(str(died[ranks[0]]).split())
        self.fail(
            f"rank {', '.join(map(str, ranks))}{where} died {when}{seen}; Ray says: {reason}",
            cause=died[ranks[0]],
            ranks=ranks,
            reason=reason,
        )

    def _stop_peers(self, title: str, failures: Mapping[int, Failed], silent: Sequence[int]) -> NoReturn:
        rank, failure = next(iter(failures.items()))
        cause = with_origin(failure, rank)
        self.fail(
            f"rank {rank} failed in {title} with {cause!r} while ranks {sorted(silent)} gave no answer within "
            f"{self.members.failure_grace:g} s, most likely waiting for it in a collective",
            cause=cause,
            ranks=sorted(failures),
            silent=sorted(silent),
            error=repr(cause),
            remote_traceback=failure.traceback,
        )

    def _raise(self, title: str, number: int, failures: Mapping[int, Failed]) -> NoReturn:
        """Every rank answered: raises the lowest rank's error, typed ones first, or the one that it points to."""
        # An operation that was refused for an earlier one tells of that failure too.
        refused = [failure.error for failure in failures.values() if isinstance(failure.error, OperationOrderError)]
        with self._lock:
            self._acknowledged |= {number, *(error.details["failed"] for error in refused if "failed" in error.details)}
        broken = [rank for rank in sorted(failures) if breaks_process_group(failures[rank].error)]
        typed = [rank for rank in sorted(failures) if isinstance(failures[rank].error, RLBackendError)]
        rank = (typed or sorted(set(failures) - set(broken)) or broken)[0]
        raised = failures[rank].error
        if isinstance(raised, RLBackendError) and raised.details.get("rank") in typed:
            rank = raised.details["rank"]
        error = with_origin(failures[rank], rank)
        if broken:
            self.fail(
                f"a collective of {title} failed on ranks {broken}: {error!r}",
                cause=error,
                ranks=broken,
                error=repr(error),
                remote_traceback=failures[rank].traceback,
            )
        if isinstance(error, RLBackendError):
            error.details.setdefault("failed_ranks", sorted(failures))
        raise error
