"""Recovery of a training group: other ranks in the place of those that died, with the same models in the same state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ray import cloudpickle

from actors.cluster import prometheus
from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.kept import Facts, Kept, KeptOperations, Ranks
from actors.train.loss import SentLoss
from actors.train.memory_boundary import MemoryBoundaries, load_call
from actors.train.order import Driver, OperationHeader
from actors.train.outcome import AFTERWARDS
from actors.train.pulse import end_processes
from rl_backend.checkpoint.durable_commit import discard_draft
from rl_backend.contracts import (
    GroupFailedError,
    OperationOrderError,
    RanksReplacedError,
    RLBackendError,
)
from rl_backend.lab.text import count, duration
from rl_backend.trace.recorder import span

# Of pickled operations in the memory of the driver: beyond it a run saves a checkpoint when its step ends, and beyond
# twice as much the group gives its recovery up.
MOST_KEPT_BYTES = 2**30
# Deaths in one operation, and starts of ranks in one recovery.
MOST_DEATHS, MOST_STARTS = 2, 3
_PAUSE_SECONDS, _START_SECONDS = 2.0, 60.0
# For a state that ranks have written, until it has reached whoever keeps it: after the next step, while its pass runs; and
# before what came since is run again, or given up.
_NEAR_SECONDS, _TAKE_SECONDS = 0.5, 10.0

logger = logging.getLogger(__name__)


class Recovered(NamedTuple):
    """Ranks that took the place of others.

    Attributes:
        reason: what became of those.
        operations, steps: run again, and how many of them were optimizer steps.
        seconds: from when the death was seen until the new ranks had caught up.
    """

    reason: str
    operations: int
    steps: int
    seconds: float

    def describe(self) -> str:
        again = f"{count(self.operations, 'operation')} run again, {count(self.steps, 'optimizer step')} among them"
        return f"{self.reason}: all ranks were replaced in {duration(self.seconds)} ({again}); the run goes on"


class StartRanks[R](Protocol):
    def __call__(self, *, driver: Driver, epoch: int, **limits: float) -> R: ...


class Recovery[R: Ranks]:
    """Sends the operations of a group, keeps them, and sends them again to new ranks when a rank dies or hangs.

    New ranks have the numbers of the operations of those before, and so the same keys of models. They build the models,
    load the boundaries (see :class:`~actors.train.kept.KeptOperations`), and run what was asked since with the same data.
    What had a result must have it again, bit for bit.

    Args:
        start: other ranks of the same group.
        in_memory: the state of each model is kept in memory after each of its optimizer steps.
    """

    def __init__(
        self, ranks: R, start: StartRanks[R], most_bytes: int = MOST_KEPT_BYTES, *, in_memory: bool = False
    ) -> None:
        self.ranks = ranks
        self.epoch = 0
        self.events: list[Recovered] = []
        self.on_recovered: Callable[[str], None] = logger.warning
        self._start = start
        self._most_bytes = most_bytes
        self._kept = KeptOperations()
        self._number = 0
        self._off = ""
        self._lock = self.steady = threading.RLock()
        self._memory: MemoryBoundaries | None = None
        if in_memory:
            self._memory = MemoryBoundaries(lambda text: self.on_recovered(text))
            self._memory.place(ranks.infos)

    @property
    def wants_boundary(self) -> bool:
        return not self._off and self._kept.nbytes > self._most_bytes

    def bound(self, handle: HandleRef, saved: Path, committed: Path) -> None:
        with self._lock:
            self._kept.bound(handle, saved, committed)

    def stepped(self, handles: Sequence[HandleRef]) -> None:
        """The optimizer step of these models was sent just now."""
        with self._lock:
            if self._memory is None or self._off:
                return
            self._take_boundaries(_TAKE_SECONDS if self.wants_boundary else _NEAR_SECONDS)
            wanted = {handle.key: handle for handle in (*handles, *self._memory.lost())}
            for key, handle in wanted.items():
                if not self._kept.is_saving(key) and not self._kept.has_gradients(key):
                    self._number = self._memory.make(handle, self.ranks) or self._number

    def forget(self, handle: HandleRef) -> None:
        """The model is freed."""
        with self._lock:
            self._kept.forget_model(handle.key)
            if self._memory is not None:
                self._memory.forget(handle.key)

    def stop(self, why: str) -> None:
        """From now on a death ends the group."""
        with self._lock:
            self._off = self._off or why
            self._kept.clear()
            if self._memory is not None:
                self._memory.close()

    def kill(self) -> None:
        self.ranks.members.kill()
        if self._memory is not None:
            self._memory.close()

    def send(
        self,
        title: str,
        calls: Sequence[bytes],
        loss: SentLoss | None,
        facts: Facts,
        epoch: int | None = None,
    ) -> Kept:
        """Starts an operation, on new ranks where a death is found now; ``epoch`` is that of the ranks it is pinned to."""
        with self._lock:
            while True:
                if epoch is not None and epoch != self.epoch:
                    raise self._replaced(title)
                ranks = self.ranks
                try:
                    header, refs = ranks.dispatch(title, calls, loss)
                    break
                except GroupFailedError as error:
                    self._recover(error, ranks)
                except OperationOrderError:
                    self.stop("another driver has operated the group")
                    raise
            kept = Kept(header, calls, loss, *facts, refs, ranks)
            self._number = header.number
            if not self._off:
                self._kept.add(kept)
                if self._kept.nbytes > 2 * self._most_bytes:
                    self.stop("more was asked since the last checkpoint or state in memory than the driver keeps")
                    logger.warning("training group %r cannot recover from now on: %s", ranks.members.name, self._off)
            return kept

    def result(self, kept: Kept, timeout: float | None) -> list[Any]:
        """The results of the ranks, of new ones where those that it was sent to die; raises as a group's future."""
        while True:
            ranks = kept.ranks
            try:
                values = ranks.collect(kept.title, kept.number, kept.outcomes, timeout)
            except GroupFailedError as error:
                self._recover(error, ranks)
                if kept.role == "pinned":
                    raise self._replaced(kept.title) from error
                # It was sent to no others: the recovery has failed in another thread.
                if kept.ranks is ranks and not ranks.has_answered(kept.outcomes):
                    raise
            except TimeoutError:
                raise
            except Exception:
                with self._lock:
                    kept.answered = kept.failed = True
                    self._kept.forget(kept)
                raise
            else:
                with self._lock:
                    kept.note(values)
                    self._kept.forget(kept)
                return values

    def _replaced(self, title: str) -> RanksReplacedError:
        return RanksReplacedError(
            f"the ranks that {title} was meant for died, and others have taken their place", title=title
        )

    def _recover(self, error: GroupFailedError, lost: Ranks) -> None:
        """Raises ``error`` where it is to end the group."""
        with self._lock:
            if self.ranks is not lost:
                return
            if self._off:
                raise error
            began, reason = time.monotonic(), error.message.removesuffix(f"; {AFTERWARDS}")
            self._blame(self._running(), error)
            self._require_boundaries(error)
            with span("recover", "operation") as traced:
                repeated = self._try_to_replace(error)
                traced.update(reason=reason, operations=len(repeated))
            steps = sum(kept.header.name == "optimizer_step" for kept in repeated)
            event = Recovered(reason, len(repeated), steps, time.monotonic() - began)
            self.events.append(event)
            prometheus.count("rl_backend_recoveries_total", 1, group=self.ranks.members.id[:8])
            self.on_recovered(event.describe())

    def _try_to_replace(self, error: GroupFailedError) -> list[Kept]:
        attempt = 1
        while True:
            try:
                # A rank that is stopped while it imports cannot be told from one that is slow.
                return self._replace({} if attempt == MOST_STARTS else {"start_timeout": _START_SECONDS * attempt})
            # Of any type: a GPU, a port or a node may not be free again yet.
            except Exception as again:
                if attempt == MOST_STARTS or self._off:
                    self.stop(f"other ranks could not take their place: {again}")
                    if isinstance(again, GroupFailedError):
                        raise
                    message = error.message.removesuffix(f"; {AFTERWARDS}")
                    raise GroupFailedError(f"{message}; {self._off}; {AFTERWARDS}", **error.details) from again
                time.sleep(_PAUSE_SECONDS * attempt)
                attempt += 1
            except BaseException:
                self.stop("a recovery was interrupted")
                raise

    def _take_boundaries(self, timeout: float) -> None:
        """What is in memory by now need not run again."""
        assert self._memory is not None, "asked by those that have one"
        for made in self._memory.made(self.ranks.infos, timeout):
            header = OperationHeader(made.number, "load_held_state")
            models = frozenset({made.handle.key})
            load = Kept(header, (), None, "changes", models, None, (), self.ranks, answered=True, boundary=made)
            self._kept.bound_in_memory(load)

    def _require_boundaries(self, error: GroupFailedError) -> None:
        """Raises where the last state in memory was lost with the ranks."""
        if self._memory is None:
            return
        self._take_boundaries(_TAKE_SECONDS)
        for boundary in self._kept.boundaries():
            if self._memory.choose(boundary) is None:
                self.stop("the state in memory was lost")
                message = error.message.removesuffix(f"; {AFTERWARDS}")
                raise GroupFailedError(
                    f"{message}; the process that kept the state of {boundary.handle.name!r} in memory died too, before "
                    "another one had it; all ranks were stopped. Continue from the newest checkpoint with resume=auto; "
                    "save_every=0 leaves none",
                    **error.details,
                ) from error

    def _running(self) -> Kept | None:
        return next((kept for kept in self._kept.unanswered() if not kept.ranks.has_answered(kept.outcomes)), None)

    def _blame(self, kept: Kept | None, error: GroupFailedError) -> None:
        if kept is None:
            return
        kept.deaths += 1
        if kept.deaths >= MOST_DEATHS:
            self.stop(f"{kept.title} has ended its ranks twice")
            message = error.message.removesuffix(f"; {AFTERWARDS}")
            raise GroupFailedError(
                f"{kept.title} has ended its ranks {kept.deaths} times, at last so: {message}; all ranks were stopped. The "
                "newest checkpoint is whole: find what this operation does to a rank, and continue with resume=auto",
                **error.details,
            ) from error

    def _replace(self, limits: Mapping[str, float]) -> list[Kept]:
        lost = self.ranks
        lost.end()
        # Before others are there: what wakes up later must find itself dead.
        end_processes(lost.infos)
        # Also of a start that fails: Ray may still have the names of its ranks.
        self.epoch += 1
        fresh = self._start(driver=lost.driver, epoch=self.epoch, **limits)
        self.ranks, self._number = fresh, self._number + 1
        fresh.take_place_of(lost, self._number)
        if self._memory is not None:
            self._memory.place(fresh.infos)
        return self._repeat(fresh)

    def _repeat(self, fresh: R) -> list[Kept]:
        repeated, last = [], 0
        for kept in self._kept.to_repeat():
            if kept.role == "pinned" or (kept.role == "reads" and kept.ranks.has_answered(kept.outcomes)):
                continue
            kept.refs, kept.ranks = fresh.repeat(kept.header, self._calls(kept, fresh), kept.loss, last), fresh
            last = kept.number
            repeated.append(kept)
            if kept.answered:
                self._compare(fresh, kept)
        # Numbers are without gaps from here on.
        nothing = cloudpickle.dumps(RankFunction(_nothing))
        header = OperationHeader(self._number, "recovered")
        refs = fresh.repeat(header, [nothing] * len(fresh.members.workers), None, last)
        try:
            fresh.collect("operation (recovered)", self._number, [outcome for outcome, _ in refs], None)
        except GroupFailedError as error:
            self._blame(self._running(), error)
            raise
        return repeated

    def _calls(self, kept: Kept, fresh: R) -> Sequence[bytes]:
        if kept.boundary is not None and self._memory is not None:
            copies = self._memory.choose(kept.boundary)
            if copies is None:
                fresh.fail(f"the state of {kept.boundary.handle.name!r} in memory was lost while ranks were replaced")
            return [load_call(kept.boundary, copies)] * len(fresh.members.workers)
        return kept.calls if kept.saves_to is None else _calls_of_save(kept, kept.saves_to)

    def _compare(self, fresh: R, kept: Kept) -> None:
        if not self._kept.repeats(kept):
            kept.digest = ""
        try:
            kept.note(fresh.collect(kept.title, kept.number, kept.outcomes, None))
        except GroupFailedError as error:
            self._blame(kept, error)
            raise
        except Exception as error:  # noqa: BLE001, a caller's function may raise anything
            if not kept.failed:
                self.stop(f"{kept.title} could not be repeated")
                problem = str(error) if isinstance(error, RLBackendError) else f"{kept.title} cannot be repeated: {error!r}"
                fresh.fail(problem, cause=error)


def _nothing(context: RankContext) -> None:
    """Saves that are complete already are not written again."""


def _calls_of_save(kept: Kept, path: Path) -> Sequence[bytes]:
    if path.exists():
        return [cloudpickle.dumps(RankFunction(_nothing))] * len(kept.calls)
    # What the ranks that died have left would be taken for a save that is being written.
    for draft in path.parent.glob(f".{path.name}.incomplete-*"):
        discard_draft(draft)
    return kept.calls
