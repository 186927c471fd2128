"""Recovery of a training group: other ranks in the place of those that died, with the same models in the same state."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ray import cloudpickle

from actors.cluster import prometheus
from actors.cluster.placement import AskedRoom
from actors.train.context import BuiltModel, HandleRef, RankContext, RankFunction
from actors.train.kept import READS, Call, Facts, Kept, KeptOperations, calls_of
from actors.train.layout import Layout
from actors.train.loss import SentLoss
from actors.train.memory_boundary import MemoryBoundaries, load_call
from actors.train.order import Driver, OperationHeader
from actors.train.outcome import AFTERWARDS, Apart
from actors.train.pulse import end_processes
from rl_backend.checkpoint.durable_commit import discard_draft
from rl_backend.contracts import (
    GroupFailedError,
    HandleError,
    OperationOrderError,
    RanksReplacedError,
    RLBackendError,
    RuntimeConfig,
    UnsupportedError,
)
from rl_backend.lab.text import count, duration
from rl_backend.trace.recorder import span

if TYPE_CHECKING:
    from actors.train.ranks import TrainRanks

# Of pickled operations in the memory of the driver: beyond it a run saves a checkpoint when its step ends, and beyond
# twice as much the group gives its recovery up.
MOST_KEPT_BYTES = 2**30
# Deaths in one operation, and starts of ranks in one recovery.
MOST_DEATHS, MOST_STARTS = 2, 3
# Of a group that got smaller, to keep all states in memory, which it cannot grow without.
MOST_HOLDS = 5
_PAUSE_SECONDS, _START_SECONDS = 2.0, 60.0
# For a state that ranks have written, until it has reached whoever keeps it: between two looks after the next step; and
# before what came since is run again, or given up; and while the group waits for it to get another layout.
_NEAR_SECONDS, _TAKE_SECONDS, _MOVE_SECONDS, _LOOK_SECONDS = 0.5, 10.0, 600.0, 5.0

logger = logging.getLogger(__name__)


class StateNotHeldError(RLBackendError):
    """A state that another layout needs could not be kept in memory; nothing has changed."""


class Recovered(NamedTuple):
    """Ranks that took the place of others.

    Attributes:
        reason: what became of those.
        operations, steps: run again, and how many of them were optimizer steps.
        seconds: from when the death was seen until the new ranks had caught up.
        by: fewer ranks than those, for which the cluster had no room.
    """

    reason: str
    operations: int
    steps: int
    seconds: float
    by: str = ""

    def describe(self) -> str:
        again = f"{count(self.operations, 'operation')} run again, {count(self.steps, 'optimizer step')} among them"
        return f"{self.reason}: all ranks were replaced{self.by} in {duration(self.seconds)} ({again}); the run goes on"


class Reshaped(NamedTuple):
    """Another layout of a group, in words, and the seconds in which it did nothing else; a recovery counts its own."""

    group: str
    before: str
    after: str
    why: str
    seconds: float

    def describe(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return f"training group {self.group!r} went from {self.before} to {self.after} in {duration(self.seconds)}{because}"


class StartRanks(Protocol):
    def __call__(
        self, *, config: RuntimeConfig, num_ranks: int, driver: Driver, epoch: int, **limits: float
    ) -> TrainRanks: ...


class Recovery:
    """Sends the operations of a group. Where it recovers it keeps them, and sends them again to new ranks when a rank dies
    or hangs.

    New ranks have the numbers of the operations of those before, and so the same keys of models. They build the models,
    load the boundaries (see :class:`~actors.train.kept.KeptOperations`), and run what was asked since with the same data.
    What had a result must have it again, bit for bit, unless they are in another layout.

    Args:
        start: other ranks of the same group; None: a death ends the group.
        in_memory: the state of each model is kept in memory after each of its optimizer steps.
        min_ranks: without room for all ranks, fewer data-parallel ones take their place, so many at least; 0: none do.
        ask_room: asks the cluster for room for so many more ranks.

    Attributes:
        models: by their keys, as they are laid out now.
        num_layouts: how often the group got another layout.
    """

    def __init__(
        self,
        ranks: TrainRanks,
        start: StartRanks | None,
        layout: Layout,
        most_bytes: int = MOST_KEPT_BYTES,
        *,
        in_memory: bool = False,
        min_ranks: int = 0,
        ask_room: Callable[[int], AskedRoom] | None = None,
    ) -> None:
        self.ranks = ranks
        self.epoch = 0
        self.layout, self.num_layouts = layout, 0
        self.models: dict[int, HandleRef] = {}
        self.events: list[Recovered] = []
        self.reshapes: list[Reshaped] = []
        self.on_recovered: Callable[[str], None] = logger.warning
        self.recovers = start is not None
        self._start = start
        self._most_bytes = most_bytes
        self._min_ranks, self._ask_room = min_ranks, ask_room
        # What the group had before it got smaller, and the room for it.
        self._wanted: Layout | None = None
        self._room: AskedRoom | None = None
        self._holds = 0
        self._kept = KeptOperations()
        self._number = 0
        self._off = "" if self.recovers else "recover=off"
        self._moves = False
        self._lock = self.steady = threading.RLock()
        self._in_memory = in_memory
        self._memory: MemoryBoundaries | None = None
        if in_memory:
            self._open_memory()

    def _open_memory(self) -> MemoryBoundaries:
        if self._memory is None:
            self._memory = MemoryBoundaries(lambda text: self.on_recovered(text))
            self._memory.place(self.ranks.infos)
        return self._memory

    @property
    def wants_boundary(self) -> bool:
        return not self._off and self._kept.nbytes > self._most_bytes

    @property
    def wanted_ranks(self) -> int:
        """Those that the group has, or that it had before it got smaller."""
        return (self._wanted or self.layout).num_ranks

    @property
    def has_room(self) -> bool:
        """Whether a group that got smaller can have the ranks again that it had."""
        room = self._room
        return room is not None and not self._off and room.is_there

    def bound(self, handle: HandleRef, saved: Path, committed: Path) -> None:
        with self._lock:
            self._kept.bound(handle, saved, committed)
            # States that were kept for another layout alone.
            if self._memory is not None and not self._in_memory and not self._kept.boundaries():
                self._memory.close()
                self._memory = None

    def stepped(self, handles: Sequence[HandleRef]) -> None:
        """The optimizer step of these models was sent just now."""
        with self._lock:
            if self._memory is None or self._off or not self._in_memory:
                return
            deadline = time.monotonic() + _TAKE_SECONDS
            self._take_boundaries(_TAKE_SECONDS if self.wants_boundary else _NEAR_SECONDS)
            wanted = {handle.key: handle for handle in (*handles, *self._memory.lost())}
            # A model's next state is asked for when the last one is there. Ranks that have a pass to compute lose nothing.
            while self._memory.making & wanted.keys() and self._reached() < self._number and time.monotonic() < deadline:
                self._take_boundaries(_NEAR_SECONDS)
            for key, handle in wanted.items():
                if not self._kept.is_saving(key) and not self._kept.has_gradients(key):
                    self._number = self._memory.make(handle, self.ranks) or self._number

    def forget(self, handle: HandleRef) -> None:
        """The model is freed."""
        with self._lock:
            self.models.pop(handle.key, None)
            self._kept.forget_model(handle.key)
            if self._memory is not None:
                self._memory.forget(handle.key)

    def stop(self, why: str) -> None:
        """From now on a death ends the group."""
        with self._lock:
            self._off = self._off or why
            self._kept.clear()
            self._free()

    def kill(self) -> None:
        self.ranks.members.kill()
        self._free()

    def _free(self) -> None:
        self._give_room_back()
        if self._memory is not None:
            self._memory.close()

    def reshape(self, layout: Layout, why: str = "") -> Reshaped:
        """Moves the models to other ranks from states in memory; ``why`` is told.

        Raises:
            HandleError: a model has gradients or is being saved; nothing has changed.
            RLBackendError: a state could not be kept, or the ranks did not start or build the models; the group goes on in
                the layout of before.
            GroupFailedError: that did not start again either.
        """
        with self._lock:
            began = time.monotonic()
            self._settle()
            self._hold_states()
            before = self.layout
            self._wanted = None
            self._give_room_back()
            self._lay_out(layout)
            try:
                self._moves = True
                self._replace({})
            except Exception as error:
                self._moves = False
                self._lay_out(before)
                self._try_to_replace(error if isinstance(error, GroupFailedError) else GroupFailedError(str(error)))
                stays = f"training group {self.ranks.members.name!r} stays on {self.layout.describe()}"
                raise RLBackendError(f"{stays}, because {layout.describe()} could not take over: {error}") from error
            except BaseException:
                self.stop("a change of the layout was interrupted")
                raise
            finally:
                self._moves = False
            return self._reshaped(before, why, time.monotonic() - began)

    def grow(self) -> Reshaped | None:
        """Gives a group that got smaller the ranks that it had; None where that cannot be now."""
        with self._lock:
            if self._wanted is None:
                return None
            try:
                return self.reshape(self._wanted, "the cluster has room again")
            except HandleError:  # at a later border
                return None
            except GroupFailedError:
                raise
            except RLBackendError as error:
                self.on_recovered(str(error))
                self._holds += 1
                if not isinstance(error, StateNotHeldError) or self._holds == MOST_HOLDS:
                    self._wanted = None
                    self._give_room_back()
                return None

    def _settle(self) -> None:
        """Waits for all that was asked; raises where models are not between two steps."""
        with suppress(Exception):  # finds ranks that are dead by now, and has others take their place
            self.result(self.send("reshape", _NOTHING, None, READS), None)
        for kept in self._kept.unanswered():
            with suppress(Exception):  # whoever waits for it is told
                self.result(kept, None)
        if self._off:
            raise RLBackendError(f"training group {self.ranks.members.name!r} keeps the layout that it has: {self._off}")
        for handle in self.models.values():
            if self._kept.has_gradients(handle.key) or self._kept.is_saving(handle.key):
                has = "has gradients" if self._kept.has_gradients(handle.key) else "is being saved"
                raise HandleError(
                    f"model {handle.name!r} {has}; a group gets another layout between two steps, and after "
                    "wait_for_checkpoint",
                    name=handle.name,
                )

    def _hold_states(self) -> None:
        """Brings the state of every model that is trained to memory outside of the ranks."""
        memory = self._open_memory()
        self._finish_boundaries(memory)
        trained = [handle for handle in self.models.values() if not handle.forward_only]
        numbers = [memory.make(handle, self.ranks) for handle in trained]
        self._number = max([self._number, *filter(None, numbers)])
        self._finish_boundaries(memory)
        for handle, number in zip(trained, numbers, strict=True):
            if self._kept.boundary_of(handle.key) != number:
                raise StateNotHeldError(
                    f"the state of {handle.name!r} could not be kept in memory, so training group "
                    f"{self.ranks.members.name!r} keeps the layout that it has",
                    name=handle.name,
                )

    def _finish_boundaries(self, memory: MemoryBoundaries) -> None:
        deadline = time.monotonic() + _MOVE_SECONDS
        while memory.making and time.monotonic() < deadline:
            self._take_boundaries(_LOOK_SECONDS)  # which also gives those up whose holder hangs

    def _lay_out(self, layout: Layout) -> None:
        self.layout, self.num_layouts = layout, self.num_layouts + 1
        self._kept.in_another_layout()

    def _reshaped(self, before: Layout, why: str, seconds: float) -> Reshaped:
        made = Reshaped(self.ranks.members.name, before.describe(), self.layout.describe(), why, seconds)
        self.reshapes.append(made)
        prometheus.count("rl_backend_reshapes_total", 1, group=self.ranks.members.id[:8])
        return made

    def _shrink(self, error: UnsupportedError) -> bool:
        """Whether the cluster, which has no room for all ranks, may have some for fewer data-parallel ones."""
        asked, free = error.details.get("asked"), error.details.get("free", {})
        if not self._min_ranks or not asked:
            return False
        most = min(int(free[kind] * self.layout.num_ranks / amount) for kind, amount in asked.items())
        smaller = self.layout.smaller(self._min_ranks, most)
        if smaller is None:
            return False
        self._wanted, self._holds = self._wanted or self.layout, 0
        self._lay_out(smaller)
        return True

    def _give_room_back(self) -> None:
        if self._room is not None:
            self._room.give_back()
            self._room = None

    def send(
        self,
        title: str,
        call: Call,
        loss: SentLoss | None,
        facts: Facts,
        epoch: int | None = None,
    ) -> Kept:
        """Starts an operation, on new ranks where a death is found now; ``epoch`` is that of the ranks it is pinned to."""
        with self._lock:
            while True:
                if epoch is not None and epoch != self.epoch:
                    raise self._replaced(title)
                ranks, call = self.ranks, self._laid_out(call)
                try:
                    header, refs = ranks.dispatch(title, calls_of(call, len(ranks.members.workers)), loss)
                    break
                except GroupFailedError as error:
                    self._recover(error, ranks)
                except OperationOrderError:
                    self.stop("another driver has operated the group")
                    raise
            kept = Kept(header, call, loss, *facts, refs, ranks)
            self._number = header.number
            if not self.recovers:
                # Without what a future that is held would keep, and nobody asks for.
                kept.call = b"" if isinstance(call, bytes) else call.without_shares()
            if not self._off:
                self._kept.add(kept)
                if self._kept.nbytes > 2 * self._most_bytes:
                    self.stop("more was asked since the last checkpoint or state in memory than the driver keeps")
                    logger.warning("training group %r cannot recover from now on: %s", ranks.members.name, self._off)
            return kept

    def result(self, kept: Kept, timeout: float | None) -> tuple[Call, list[Any]]:
        """What the ranks were sent, and their results, of new ones where those that it was sent to die; raises as a group's
        future.
        """
        while True:
            with self._lock:
                ranks, refs, call, layout = kept.ranks, kept.refs, kept.call, self.num_layouts
            try:
                values = ranks.collect(kept.title, kept.number, [outcome for outcome, _ in refs], timeout)
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
                    if layout == self.num_layouts:
                        if self.recovers:
                            kept.note(values)
                        # Here, so that whoever changes the layout next finds the model.
                        if kept.role == "builds" and isinstance(values[0], BuiltModel):
                            self.models.setdefault(kept.number, HandleRef.of(values))
                    elif kept.role == "builds":  # asked of other ranks since, which have another layout
                        continue
                    self._kept.forget(kept)
                return call, [
                    value._replace(stored=stored) if isinstance(value, Apart) else value
                    for value, (_, stored) in zip(values, refs, strict=True)
                ]

    def _replaced(self, title: str) -> RanksReplacedError:
        return RanksReplacedError(
            f"the ranks that {title} was meant for died, and others have taken their place", title=title
        )

    def _recover(self, error: GroupFailedError, lost: TrainRanks) -> None:
        """Raises ``error`` where it is to end the group."""
        with self._lock:
            if self.ranks is not lost:
                return
            if self._off:
                raise error
            began, before, reason = time.monotonic(), self.layout, _why(error)
            self._blame(self._running(), error)
            self._require_boundaries(error)
            with span("recover", "operation") as traced:
                repeated = self._try_to_replace(error)
                traced.update(reason=reason, operations=len(repeated))
            steps, by = sum(kept.header.name == "optimizer_step" for kept in repeated), ""
            if self.layout is not before:
                by = f" by {self.layout.describe()} in place of {before.describe()}, for which the cluster has no room,"
                self._reshaped(before, "the cluster has no room", 0.0)
            event = Recovered(reason, len(repeated), steps, time.monotonic() - began, by)
            self.events.append(event)
            prometheus.count("rl_backend_recoveries_total", 1, group=self.ranks.members.id[:8])
            self.on_recovered(event.describe())

    def _try_to_replace(self, error: GroupFailedError) -> list[Kept]:
        attempt = 1
        self._give_room_back()
        while True:
            try:
                # A rank that is stopped while it imports cannot be told from one that is slow.
                repeated = self._replace({} if attempt == MOST_STARTS else {"start_timeout": _START_SECONDS * attempt})
                # Not before: it would take what the ranks themselves need.
                if self._wanted is not None and self._ask_room is not None:
                    self._room = self._ask_room(self._wanted.num_ranks - self.layout.num_ranks)
                return repeated
            # Of any type: a GPU, a port or a node may not be free again yet.
            except Exception as again:
                if isinstance(again, UnsupportedError) and self._shrink(again):
                    continue
                if attempt == MOST_STARTS or self._off:
                    self.stop(f"other ranks could not take their place: {again}")
                    if isinstance(again, GroupFailedError):
                        raise
                    raise GroupFailedError(f"{_why(error)}; {self._off}; {AFTERWARDS}", **error.details) from again
                time.sleep(_PAUSE_SECONDS * attempt)
                attempt += 1
            except BaseException:
                self.stop("a recovery was interrupted")
                raise

    def _take_boundaries(self, timeout: float) -> None:
        """What is in memory by now need not run again."""
        assert self._memory is not None, "asked by those that have one"
        for made in self._memory.made(self.ranks.infos, timeout, self._reached):
            header = OperationHeader(made.number, "load_held_state")
            models = frozenset({made.handle.key})
            load = Kept(header, b"", None, "changes", models, None, (), self.ranks, answered=True, boundary=made)
            self._kept.bound_in_memory(load)

    def _require_boundaries(self, error: GroupFailedError) -> None:
        """Raises where the last state in memory was lost with the ranks."""
        if self._memory is None:
            return
        self._take_boundaries(_TAKE_SECONDS)
        for boundary in self._kept.boundaries():
            if self._memory.choose(boundary) is None:
                self.stop("the state in memory was lost")
                raise GroupFailedError(
                    f"{_why(error)}; the process that kept the state of {boundary.handle.name!r} in memory died too, before "
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
            rows = "" if isinstance(kept.call, bytes) else f" (rows: {kept.call.describe()})"
            memory = f". Then held memory on the driver's node: {held}" if (held := error.details.get("memory")) else ""
            raise GroupFailedError(
                f"{kept.title}{rows} has ended its ranks {kept.deaths} times, at last so: {_why(error)}{memory}; all ranks "
                "were stopped. The newest checkpoint is whole: find what this operation does to a rank, and continue with "
                "resume=auto",
                **error.details,
            ) from error

    def _reached(self) -> float:
        """The number of the first operation that ranks have not ended, as far as the driver can tell."""
        running = self._running()
        return math.inf if running is None else running.number

    def _replace(self, limits: Mapping[str, float]) -> list[Kept]:
        lost = self.ranks
        lost.end()
        # Before others are there: what wakes up later must find itself dead.
        end_processes(lost.infos)
        # Also of a start that fails: Ray may still have the names of its ranks.
        self.epoch += 1
        config, num_ranks = self.layout
        assert self._start is not None, "it recovers"
        fresh = self._start(config=config, num_ranks=num_ranks, driver=lost.driver, epoch=self.epoch, **limits)
        self.ranks, self._number = fresh, self._number + 1
        fresh.take_place_of(lost, self._number)
        if self._memory is not None:
            self._memory.place(fresh.infos)
        return self._repeat(fresh)

    def _repeat(self, fresh: TrainRanks) -> list[Kept]:
        repeated, last = [], 0
        for kept in self._kept.to_repeat():
            if kept.role == "pinned" or (kept.role == "reads" and kept.ranks.has_answered(kept.outcomes)):
                continue
            calls = calls_of(self._call(kept, fresh), len(fresh.members.workers))
            kept.refs, kept.ranks = fresh.repeat(kept.header, calls, kept.loss, last), fresh
            last = kept.number
            repeated.append(kept)
            if kept.answered or kept.number in self.models:
                self._compare(fresh, kept)
        # Numbers are without gaps from here on.
        header = OperationHeader(self._number, "recovered")
        refs = fresh.repeat(header, calls_of(_NOTHING, len(fresh.members.workers)), None, last)
        try:
            fresh.collect("operation (recovered)", self._number, [outcome for outcome, _ in refs], None)
        except GroupFailedError as error:
            self._blame(self._running(), error)
            raise
        return repeated

    def _call(self, kept: Kept, fresh: TrainRanks) -> Call:
        if kept.boundary is not None and self._memory is not None:
            copies = self._memory.choose(kept.boundary)
            if copies is None:
                fresh.fail(f"the state of {kept.boundary.handle.name!r} in memory was lost while ranks were replaced")
            return load_call(kept.boundary, copies)
        kept.call = self._laid_out(kept.call)
        return kept.call if kept.saves_to is None else _call_of_save(kept, kept.saves_to)

    def _laid_out(self, call: Call) -> Call:
        """The call for the layout that its model has now."""
        if not isinstance(call, bytes) and (handle := self.models.get(call.handle.key, call.handle)) != call.handle:
            return call.on(handle)
        return call

    def _compare(self, fresh: TrainRanks, kept: Kept) -> None:
        if not self._kept.repeats(kept):
            kept.digest = ""
        try:
            values = fresh.collect(kept.title, kept.number, kept.outcomes, None)
            kept.note(values)
            if kept.number in self.models:
                self.models[kept.number] = HandleRef.of(values)
        except GroupFailedError as error:
            self._blame(kept, error)
            raise
        except Exception as error:
            if self._moves and not kept.failed:
                raise
            if not kept.failed:
                self.stop(f"{kept.title} could not be repeated")
                problem = str(error) if isinstance(error, RLBackendError) else f"{kept.title} cannot be repeated: {error!r}"
                fresh.fail(problem, cause=error)


def _why(error: GroupFailedError) -> str:
    return error.message.removesuffix(f"; {AFTERWARDS}")


def _nothing(context: RankContext) -> None:
    """Saves that are complete already are not written again."""


_NOTHING: bytes = cloudpickle.dumps(RankFunction(_nothing))


def _call_of_save(kept: Kept, path: Path) -> Call:
    if path.exists():
        return _NOTHING
    # What the ranks that died have left would be taken for a save that is being written.
    for draft in path.parent.glob(f".{path.name}.incomplete-*"):
        discard_draft(draft)
    return kept.call
