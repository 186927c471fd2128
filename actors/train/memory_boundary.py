"""Boundaries in memory: the state of a model after a step, where it outlives the ranks that had it.

Each rank copies its part to memory that a holder, a process of its node, keeps open too; where there is another node, a
holder there copies it from that. Of each model there are two: one is written while the other one is whole.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import ray
import torch
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from actors.cluster.placement import living_nodes
from actors.cluster.processes import Process
from actors.cluster.ray_watch import ray_is_usable
from actors.train.context import HandleRef, RankContext, RankFunction
from actors.train.outcome import Apart, RankInfo
from actors.train.pulse import end_processes
from actors.wire.held_memory import HeldKey, HolderActor, Written, fetch, nameless_file
from rl_backend.checkpoint.state_in_memory import StateInMemory, write_state
from rl_backend.contracts import GroupFailedError
from rl_backend.lab.doctor.machine import read_memory

if TYPE_CHECKING:
    from actors.train.ranks import TrainRanks

_PING_SECONDS = 5.0
# After so long without an answer holders are asked whether they live, and sooner where one of this host is stopped.
_PATIENCE_SECONDS, _STOPPED_SECONDS = 60.0, 3.0
_MOST_DEATHS = 2
_SEGMENTS = "memory_boundary"
_OLDER = "a recovery runs again what came since the last state that is"


class Copy(NamedTuple):
    """What one rank has written, as the holder of one node has it."""

    node_id: str
    holder: Any
    key: HeldKey
    written: Written


@dataclass(frozen=True)
class Boundary:
    """The state of a model after an operation, with the copies of each rank's part, the nearest first."""

    handle: HandleRef
    number: int
    generation: int
    copies: tuple[tuple[Copy, ...], ...]


@dataclass(frozen=True)
class _Asked:
    """A boundary that is being made; ``places`` are those of ``refs``, by which holders answer: node, holder, key."""

    handle: HandleRef
    number: int
    generation: int
    places: Sequence[tuple[str, Any, HeldKey]]
    refs: Sequence[Any]
    since: float = field(default_factory=time.monotonic)


class MemoryBoundaries:
    """Makes boundaries of the models of a group, and finds them again; one for each model at a time.

    Args:
        say: is told in a sentence what goes wrong, as soon as it is known.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = set[Any]()
        self._holders: dict[str, Any] = {}
        self._started: list[Any] = []
        self._processes: dict[int, Any] = {}
        self._dead = set[int]()
        self._deaths = 0
        self._mirrors: dict[str, str] = {}
        self._asked: dict[int, _Asked] = {}
        self._last: dict[int, Boundary] = {}

    def place(self, infos: Sequence[RankInfo]) -> None:
        """Starts what is missing of holders: one on each node of these ranks, and where copies of theirs are to be."""
        self._asked.clear()
        homes = {info.node_id for info in infos}
        nodes = homes if len(homes) > 1 else homes.union(node["NodeID"] for node in living_nodes())
        ring = sorted(nodes)
        others = {home: ring[(ring.index(home) + 1) % len(ring)] for home in homes}
        self._mirrors = {home: other for home, other in others.items() if other != home}
        for node_id in homes.union(self._mirrors.values()) - self._holders.keys():
            self._holders[node_id] = holder = start_holder(node_id)
            self._started.append(holder)
            self._processes[id(holder)] = holder.ping.remote()

    def make(self, handle: HandleRef, ranks: TrainRanks) -> int | None:
        """Starts a boundary of the state that the model has now; its operation's number, or None where one is being made."""
        if handle.key in self._asked or self._deaths >= _MOST_DEATHS:
            return None
        last = self._last.get(handle.key)
        generation = 0 if last is None else 1 - last.generation
        call = cloudpickle.dumps(RankFunction(hold_state, (handle, generation)))
        try:
            header, refs = ranks.dispatch("hold_state", [call] * len(ranks.infos))
        except GroupFailedError:
            return None  # what is asked of the ranks next finds it too, and recovers
        places, answers = [], []
        for info, (_, written) in zip(ranks.infos, refs, strict=True):
            key, home = HeldKey(handle.key, info.rank, header.number), info.node_id
            kept = self._holders[home].keep.remote(key, written)
            places.append((home, self._holders[home], key))
            answers.append(kept)
            if (other := self._mirrors.get(home)) is not None:
                places.append((other, self._holders[other], key))
                answers.append(self._holders[other].pull.remote(key, self._holders[home], kept))
        self._asked[handle.key] = _Asked(handle, header.number, generation, places, answers)
        return header.number

    @property
    def making(self) -> Set[int]:
        """Keys of the models of which a state is being made."""
        return self._asked.keys()

    def made(
        self, infos: Sequence[RankInfo], timeout: float = 0.0, reached: Callable[[], float] = lambda: math.inf
    ) -> list[Boundary]:
        """Those that are complete since the last call, after ``timeout`` seconds at most.

        ``reached`` tells how far ranks have come, by the number of an operation: those that have not come to a copy did not
        die of it.
        """
        found, died, deadline = [], False, time.monotonic() + timeout
        for key, asked in list(self._asked.items()):
            if self._asked.get(key) is not asked:
                continue  # given up with its holder
            left = max(deadline - time.monotonic(), 0.0)
            _, waiting = ray.wait(list(asked.refs), num_returns=len(asked.refs), timeout=left)
            if waiting:
                waited = time.monotonic() - asked.since
                if waited > _PATIENCE_SECONDS or (waited > _STOPPED_SECONDS and self._is_stopped()):
                    self._replace_holders(infos, hung=True)
                continue
            del self._asked[key]
            try:
                answers = ray.get(list(asked.refs))
            except RayError:
                died = (not self._replace_holders(infos) and asked.number <= reached()) or died
                continue
            copies = _copies(asked, answers, len(infos))
            if all(copies):
                found.append(self._boundary(asked, copies))
            if problem := next((each for each in answers if isinstance(each, str)), None):
                about, state = (asked.handle.key, problem.partition(":")[0]), f"the state of {asked.handle.name!r}"
                if all(copies):
                    self._say_once(f"{state} has no copy on another node than its ranks' ({problem})", about)
                else:
                    self._say_once(f"{state} could not be kept in memory ({problem}); {_OLDER}", about)
        if died:
            self._count_deaths()
        return found

    def choose(self, boundary: Boundary) -> list[Copy] | None:
        """A copy of each rank's part whose holder lives; None where one has none."""
        # One that hangs is passed over where another one has the same; its memory can be read all the same.
        hung = all(len(copies) > 1 for copies in boundary.copies)
        holders = {id(copy.holder): copy.holder for copies in boundary.copies for copy in copies}
        living = {key for key, holder in holders.items() if not _has_died(holder, hung=hung)}
        found = [[copy for copy in copies if id(copy.holder) in living] for copies in boundary.copies]
        return [copies[0] for copies in found] if all(found) else None

    def lost(self) -> list[HandleRef]:
        """Models whose last state was lost with its holders, also of those that take no step any more."""
        return [
            last.handle
            for last in self._last.values()
            if any(all(id(copy.holder) in self._dead for copy in copies) for copies in last.copies)
        ]

    def forget(self, model: int) -> None:
        """Frees what is held of a model that is gone."""
        self._asked.pop(model, None)
        self._last.pop(model, None)
        for holder in self._started:
            holder.drop.remote(model, math.inf)

    def close(self) -> None:
        """Frees all memory; does nothing once Ray is shut down or lost, which did the same."""
        if ray_is_usable():
            for holder in self._started:
                ray.kill(holder)
        self._started.clear()

    def _boundary(self, asked: _Asked, copies: Sequence[Sequence[Copy]]) -> Boundary:
        made = Boundary(asked.handle, asked.number, asked.generation, tuple(map(tuple, copies)))
        self._last[asked.handle.key], self._deaths = made, 0
        for holder in self._started:
            holder.drop.remote(made.handle.key, made.number)
        return made

    def _replace_holders(self, infos: Sequence[RankInfo], *, hung: bool = False) -> bool:
        """Whether any was lost."""
        before = len(self._dead)
        for node_id, holder in list(self._holders.items()):
            if _has_died(holder, hung=hung):
                ray.kill(holder)
                if hung:
                    self._end_stopped(node_id, holder)
                self._dead.add(id(holder))
                del self._holders[node_id]
                self._say(
                    f"the process on node {node_id[:8]} that keeps the state of training ranks in memory was lost; another "
                    "one is started, and gets what they have after the next optimizer step"
                )
        lost = len(self._dead) > before
        if lost:
            self.place(infos)
        return lost

    def _is_stopped(self) -> bool:
        """Whether the holder of this host is: what a look at its process shows."""
        holder = self._holders.get(ray.get_runtime_context().get_node_id())
        with suppress(RayError):
            return holder is not None and Process(*ray.get(self._processes[id(holder)], timeout=_PING_SECONDS)).is_stopped
        return False

    def _end_stopped(self, node_id: str, holder: Any) -> None:
        with suppress(RayError):
            pid, started = ray.get(self._processes[id(holder)], timeout=_PING_SECONDS)
            end_processes([RankInfo(-1, node_id, "", pid, started)])

    def _count_deaths(self) -> None:
        """Ranks died before they had copied their state; what that takes may be why."""
        self._deaths += 1
        if self._deaths == _MOST_DEATHS:
            self._say_once(
                f"ranks died {self._deaths} times before their state was in memory, and none is kept any more; {_OLDER}"
            )

    def _say_once(self, problem: str, about: object = None) -> None:
        # By its kind where it has figures, which are others each time.
        if (about or problem) not in self._said:
            self._said.add(about or problem)
            self._say(problem)


def _copies(asked: _Asked, answers: Sequence[Any], num_ranks: int) -> list[list[Copy]]:
    copies: list[list[Copy]] = [[] for _ in range(num_ranks)]
    for (node_id, holder, key), written in zip(asked.places, answers, strict=True):
        if isinstance(written, Written):
            copies[key.rank].append(Copy(node_id, holder, key, written))
    return copies


def start_holder(node_id: str) -> Any:
    return HolderActor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


def _has_died(holder: Any, *, hung: bool = False) -> bool:
    try:
        ray.get(holder.ping.remote(), timeout=_PING_SECONDS)
    except GetTimeoutError:
        return hung
    except RayError:
        return True
    return False


def load_call(boundary: Boundary, copies: Sequence[Copy]) -> bytes:
    """The operation of every rank that brings a model back."""
    return bytes(cloudpickle.dumps(RankFunction(load_held_state, (boundary.handle, tuple(copies)))))


class _Segment:
    """Memory of a rank for one of its boundaries, which stays mapped: fresh pages cost more than what is written to them."""

    def __init__(self, nbytes: int) -> None:
        _, available = read_memory()
        if nbytes > available:
            # Its pages are taken when they are written to, and the kernel would end some process instead.
            raise MemoryError(f"it takes {nbytes / 2**20:.0f} MiB, and {available / 2**20:.0f} MiB are free")
        descriptor, self.path = nameless_file(nbytes)
        finalize(self, os.close, descriptor)
        self.memory = torch.from_file(self.path, shared=True, size=nbytes, dtype=torch.uint8)


def hold_state(context: RankContext, handle: HandleRef, generation: int) -> Apart[None]:
    """Copies a rank's part of a model's state to its memory of that generation; for the holder, where that is."""
    try:
        model = context.handle(handle)
        state, manifest = context.runtime.training_state(model)
        segments = context.state.setdefault(_SEGMENTS, WeakKeyDictionary()).setdefault(model, {})

        def room(nbytes: int) -> Tensor:
            if generation not in segments or segments[generation].memory.nbytes < nbytes:
                # Room for a table that grows by some digits.
                segments[generation] = _Segment((nbytes + 4096) // 65536 * 65536 + 65536)
            memory: Tensor = segments[generation].memory
            return memory

        table, end = write_state(state, manifest, room)
    except Exception as error:  # noqa: BLE001, the run goes on without this boundary
        return Apart(None, f"{type(error).__name__}: {error}")
    return Apart(None, Written(segments[generation].path, table, end))


def load_held_state(context: RankContext, handle: HandleRef, copies: Sequence[Copy]) -> None:
    here, mapped = ray.get_runtime_context().get_node_id(), dict[int, Tensor]()

    def read(rank: int, start: int, end: int) -> Tensor:
        copy = copies[rank]
        if copy.node_id != here:
            return torch.from_numpy(fetch(copy.holder, copy.key, start, end))
        if rank not in mapped:
            mapped[rank] = torch.from_file(copy.written.path, shared=True, size=copy.written.end, dtype=torch.uint8)
        return mapped[rank][start:end]

    tables = [(copy.written.table, copy.written.end) for copy in copies]
    state = StateInMemory(f"the state of {handle.name!r} in memory", tables, read)
    context.runtime.load_checkpoint(context.handle(handle), state)
