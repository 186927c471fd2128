"""Signs of life of a group's ranks, and the end of those that show none."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import finalize

import ray
from ray.exceptions import RayError

from actors.cluster.processes import Place, Process, call_on_node, place_in, stacks_of
from actors.train.outcome import RankInfo

LOOK_SECONDS = 1.0
# Of a process of this node the kernel says whether it is stopped. Whoever stops one to look at it for a moment may. A
# driver that waits sees one that has been stopped for so long at most two looks later.
STOPPED_SECONDS = 3.0
# After a failure the peers of that rank are looked at more often. One that passes from collective to collective is in other
# calls at some of these looks, which together take a second.
PEER_SECONDS, PEER_LOOKS = 0.1, 5
# A wait for an operation is told of when it has lasted so long, and twice as long, and so on.
LONG_SECONDS = 300.0
_END_SECONDS = 20.0
_STACKS_SECONDS = 10.0


@dataclass(frozen=True)
class WaitBounds:
    """What a driver waits for a rank.

    Attributes:
        silence: seconds that a rank may not answer, to a thread of its own beside the one that computes. A GPU kernel, a
            compilation or a collective that waits does not silence it, code that keeps Python's lock does.
        operation: seconds that a rank may take for one operation, from when it begins.
    """

    silence: float = 60.0
    operation: float = 7200.0


BOUNDS = WaitBounds()
# While ranks start, imports and the first use of a GPU keep Python's lock for long: one that is stopped alone hangs.
STARTING = WaitBounds(math.inf, math.inf)

type Recover = Literal["checkpoint", "memory", "off"]
"""What the death of a rank does: its group recovers from the last checkpoint, or from the state after the last step, which
is kept in memory outside of the ranks, or it ends."""


@dataclass
class _Rank:
    asked: Any = None
    silent: float = 0.0
    running: int = 0
    worked: float = 0.0


@dataclass
class Pulse:
    """Asks ranks for signs of life while their driver waits for them; a look costs one small call of each. ``stopped``
    are the seconds of :class:`StoppedRanks`.
    """

    workers: Sequence[Any]
    bounds: WaitBounds
    stopped: Mapping[int, float] = field(default_factory=dict)
    _ranks: list[_Rank] = field(default_factory=list)
    _looked: float = field(default_factory=lambda: time.monotonic())
    _waited: float = 0.0
    _long: float = LONG_SECONDS

    def __post_init__(self) -> None:
        self._ranks = [_Rank() for _ in self.workers]

    def look(self) -> tuple[list[int], str] | None:
        """The ranks that hang, and how; None where all are alive."""
        now = time.monotonic()
        # A driver that was stopped itself, or starved, has not waited for anybody meanwhile.
        passed, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now
        self._waited += passed
        for worker, rank in zip(self.workers, self._ranks, strict=True):
            self._hear(worker, rank, passed)
        found = [
            (sorted(n for n, seconds in self.stopped.items() if seconds >= STOPPED_SECONDS), "is stopped (SIGSTOP)"),
            (
                [n for n, rank in enumerate(self._ranks) if rank.silent > self.bounds.silence],
                f"has given no sign of life for {self.bounds.silence:g} s",
            ),
            (
                [n for n, rank in enumerate(self._ranks) if rank.worked > self.bounds.operation],
                f"has not finished within {self.bounds.operation:g} s of its beginning",
            ),
        ]
        return next(((ranks, how) for ranks, how in found if ranks), None)

    def long_wait(self) -> float:
        """Seconds of this wait, where somebody should be told of it now; else 0."""
        if self._waited < self._long:
            return 0.0
        self._long *= 2
        return self._waited

    def _hear(self, worker: Any, rank: _Rank, passed: float) -> None:
        if rank.asked is not None and ray.wait([rank.asked], num_returns=1, timeout=0)[0]:
            with suppress(RayError):  # a rank that died is found by what waits for its answer
                started, finished = ray.get(rank.asked)
                same = started == rank.running and started > finished
                rank.running, rank.worked = started, rank.worked + rank.silent + passed if same else 0.0
            rank.asked, rank.silent = None, 0.0
        elif rank.asked is not None:
            rank.silent += passed
        if rank.asked is None:
            rank.asked = worker.progress.remote()


class StoppedRanks:
    """Looks at the ranks of this node, even while nobody waits for them.

    Attributes:
        seconds: rank -> how long its process has been stopped.
    """

    def __init__(self, infos: Sequence[RankInfo]) -> None:
        here = {info.rank: Process(info.pid, info.started) for info in infos if info.started and info.node_id == _here()}
        self.seconds = dict.fromkeys(here, 0.0)
        self._closed = threading.Event()
        # Not of this object, which goes with the ranks of a group that nobody closes.
        looks = (here, self.seconds, self._closed)
        threading.Thread(target=_look_for_stopped, args=looks, name="look for stopped ranks", daemon=True).start()
        finalize(self, self._closed.set)

    def close(self) -> None:
        self._closed.set()


def _look_for_stopped(here: Mapping[int, Process], stopped: dict[int, float], closed: threading.Event) -> None:
    # By looks and not by a clock: where this process stood still itself, nobody has been stopped for long.
    looks = dict.fromkeys(here, 0)
    while not closed.wait(LOOK_SECONDS):
        for rank, process in here.items():
            looks[rank] = looks[rank] + 1 if process.is_stopped else 0
            stopped[rank] = max(looks[rank] - 1, 0) * LOOK_SECONDS


def _here() -> str:
    return str(ray.get_runtime_context().get_node_id())


@dataclass
class PeersOfFailed:
    """The ranks that have not answered after another one has failed."""

    _before: Mapping[int, Place] = field(default_factory=dict)
    _times: int = 0

    def look(self, infos: Sequence[RankInfo]) -> bool:
        """Whether all of them have waited for a transfer in all of the last looks, each in one place: most likely for the
        failed one. A transfer among themselves that takes longer than these looks cannot be told from that.
        """
        now = places_in_code(infos)
        waiting = 0 < len(now) == len(infos) and all(place.waits for place in now.values())
        self._times = self._times + 1 if waiting and now == self._before else int(waiting)
        self._before = now
        return self._times >= PEER_LOOKS


def places_in_code(infos: Sequence[RankInfo]) -> dict[int, Place]:
    """Where the ranks are whose processes can say it."""
    asked = {
        info.rank: call_on_node(info.node_id, _place_in_code, info.pid, info.started)
        for info in infos
        if info.started and info.node_id != _here()
    }
    here = [info for info in infos if info.node_id == _here()]
    with ThreadPoolExecutor(max(len(here), 1)) as threads:
        places = threads.map(lambda info: _place_in_code(info.pid, info.started), here)
    found = {info.rank: place for info, place in zip(here, places, strict=True)}
    if asked:
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_STACKS_SECONDS)
        with suppress(RayError):  # of a node that is lost
            found |= {rank: ray.get(ref) for rank, ref in asked.items() if ref in ready}
    return {rank: found[rank] for rank in sorted(found) if found[rank].calls}


def _place_in_code(pid: int, started: str) -> Place:
    return place_in(stacks_of(Process(pid, started)) if started else "", "worker.py:execute")


def end_processes(infos: Sequence[RankInfo]) -> None:
    """Ends ranks for good, those that are stopped too: none of them writes or sends again. Waits until they are gone.

    A node that is lost cannot be asked, and is passed over.
    """
    waiting = []
    for info in infos:
        if info.node_id == _here():
            end_process(info.pid, info.started)
        else:
            waiting.append(call_on_node(info.node_id, end_process, info.pid, info.started))
    if waiting:
        ray.wait(waiting, num_returns=len(waiting), timeout=_END_SECONDS)


def end_process(pid: int, started: str) -> None:
    process, deadline = Process(pid, started), time.monotonic() + _END_SECONDS
    # Ray asks a process to end, which one that is stopped does not hear; SIGKILL reaches it.
    while started and not process.has_ended and time.monotonic() < deadline:
        process.kill()
        time.sleep(0.02)
