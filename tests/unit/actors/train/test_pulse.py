"""Signs of life: which ranks count as dead, on the clock of this process and with real processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.cluster.processes import Place, start_time
from actors.train import pulse as module
from actors.train.outcome import RankInfo
from actors.train.pulse import (
    PEER_LOOKS,
    PeersOfFailed,
    Pulse,
    StoppedRanks,
    WaitBounds,
    end_process,
)
from tests.support.actors_in_process import until
from tests.support.told_ranks import Ref, ToldRay

BOUNDS, NODES = WaitBounds(silence=30.0, operation=100.0), ("here", "there")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Rank:
    """Answers what it is told to; None does not answer."""

    def __init__(self) -> None:
        self.at: tuple[int, int] | None = (1, 1)
        self.progress = SimpleNamespace(remote=lambda: Ref(self.at, comes=self.at is not None))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "ray", ToldRay())
    monkeypatch.setattr(module, "_here", lambda: "here")
    return made


def looks(pulse: Pulse, clock: Clock, seconds: float, step: float = 1.0) -> Any:
    found, until = None, clock.now + seconds
    while found is None and clock.now < until:
        clock.now += step
        found = pulse.look()
    return found


def begun(ranks: list[Rank]) -> Pulse:
    return Pulse(ranks, BOUNDS)


def test_a_rank_that_gives_no_sign_counts_as_dead_after_the_bound_and_not_before(clock: Clock) -> None:
    ranks = [Rank(), Rank(), Rank()]
    pulse = begun(ranks)
    assert looks(pulse, clock, 50) is None
    ranks[1].at = None
    began = clock.now
    assert looks(pulse, clock, 60) == ([1], "has given no sign of life for 30 s")
    assert 30 < clock.now - began <= 33


def test_a_long_wait_is_told_of_more_and_more_seldom(clock: Clock) -> None:
    pulse, told = begun([Rank()]), []
    for _ in range(3000):
        assert looks(pulse, clock, 1) is None
        told += [seconds] if (seconds := pulse.long_wait()) else []
    assert told == [300, 600, 1200, 2400]


def test_a_driver_that_slept_itself_blames_nobody(clock: Clock) -> None:
    rank = Rank()
    pulse = begun([rank])
    rank.at = None
    assert looks(pulse, clock, 3) is None
    clock.now += 600
    assert pulse.look() is None and looks(pulse, clock, 20) is None


def test_an_operation_is_timed_from_its_beginning_on_the_rank(clock: Clock) -> None:
    rank = Rank()
    pulse = begun([rank])
    for number in range(2, 6):  # many operations, each within the bound
        rank.at = (number, number - 1)
        assert looks(pulse, clock, 80) is None
    rank.at = (9, 8)
    began = clock.now
    assert looks(pulse, clock, 200) == ([0], "has not finished within 100 s of its beginning")
    assert 100 <= clock.now - began <= 105
    rank.at = (9, 9)
    assert looks(begun([rank]), clock, 300) is None, "it waits for work"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as made:
        yield made
        made.kill()


def test_a_rank_of_this_node_that_stays_stopped_hangs_and_one_that_continues_does_not(
    clock: Clock, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "STOPPED_SECONDS", 0.5)
    infos = [RankInfo(rank, node, "10.0.0.1", process.pid, start_time(process.pid)) for rank, node in enumerate(NODES)]
    stopped = StoppedRanks(infos)
    assert set(stopped.seconds) == {0}, "the number is another process's on another node"
    pulse = Pulse([Rank(), Rank()], BOUNDS, stopped.seconds)
    for _ in range(2):
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: stopped.seconds[0] > 0)
        assert pulse.look() is None, "somebody looks at it for a moment"
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: stopped.seconds[0] == 0)
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stopped.seconds[0] >= 0.5)
    # The second one's driver begins to wait now.
    for each in (pulse, Pulse([Rank(), Rank()], BOUNDS, stopped.seconds)):
        assert each.look() == ([0], "is stopped (SIGSTOP)")


def test_moments_in_which_a_process_is_stopped_do_not_add_up() -> None:
    states, seconds, seen = [True, True, False, True, True, True], {0: 0.0}, list[float]()

    class Looked:
        @property
        def is_stopped(self) -> bool:
            return states.pop(0)

    def wait(_: float) -> bool:
        seen.append(seconds[0])
        return not states

    process: Any = Looked()
    closed: Any = SimpleNamespace(wait=wait)
    module._look_for_stopped({0: process}, seconds, closed)
    assert seen == [0, 0, 1, 0, 0, 1, 2], "of what was before the first look that finds it stopped nobody knows"


def test_ranks_are_looked_at_until_they_end_or_nobody_has_them(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    before, closed, dropped = set(threading.enumerate()), StoppedRanks(()), StoppedRanks(())
    made = set(threading.enumerate()) - before
    assert len(made) == 2
    closed.close()
    del dropped
    until(lambda: not made & set(threading.enumerate()))


def test_what_was_stopped_is_gone_when_others_take_its_place(process: subprocess.Popen[bytes]) -> None:
    started = start_time(process.pid)
    end_process(process.pid, "another")
    assert process.poll() is None, "numbers of processes come again"
    os.kill(process.pid, signal.SIGSTOP)
    end_process(process.pid, started)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(5) == -signal.SIGKILL and start_time(process.pid) == ""


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 355 in wait
  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2800 in all_reduce
  File "/project/mine.py", line 12 in step
  File "/work/actors/train/worker.py", line 112 in run
  File "/work/actors/train/worker.py", line 80 in execute
  File "/site-packages/ray/util/tracing.py", line 464 in _resume_span
"""


def test_ranks_say_where_in_their_operation_they_are_on_every_node(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_node(rank: int, node: str, pid: int, started: str = "1") -> RankInfo:
        return RankInfo(rank, node, "10.0.0.1", pid, started)

    stacks = {3: STACKS, 4: "", 6: 'Thread 0x1:\n  File "a.py", line 1 in f'}
    monkeypatch.setattr(module, "stacks_of", lambda process: stacks[process.pid])
    monkeypatch.setattr(module, "call_on_node", lambda node, function, *given: Ref(function(*given), comes=node != "lost"))
    infos = [of_node(0, "here", 3), of_node(1, "here", 4), of_node(2, "here", 6), of_node(3, "there", 3)]
    infos.append(of_node(4, "here", 9, ""))
    calls = "all_reduce (distributed_c10d.py:2800), called from step (mine.py:12), called from run (worker.py:112)"
    place = Place(calls, waits=False)  # there is no such file
    assert module.places_in_code(infos) == {0: place, 3: place}
    assert module.places_in_code([of_node(0, "lost", 3)]) == {}


WAITS, WAITS_ELSEWHERE, COMPUTES = Place("all_reduce", True), Place("recv", True), Place("step", False)


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([{0: WAITS, 2: WAITS_ELSEWHERE}] * PEER_LOOKS, True),
        ([{0: WAITS, 2: COMPUTES}] * PEER_LOOKS, False),
        ([{0: WAITS}] * PEER_LOOKS, False),
        ([{}] * PEER_LOOKS, False),
        ([{0: WAITS, 2: WAITS}, *[{0: WAITS_ELSEWHERE, 2: WAITS}] * (PEER_LOOKS - 1)], False),
        ([{0: WAITS, 2: COMPUTES}, *[{0: WAITS, 2: WAITS}] * PEER_LOOKS], True),
    ],
    ids=["both wait", "one computes", "one does not say", "none says", "one went on", "one waits after a while"],
)
def test_peers_of_a_rank_that_failed_are_lost_once_all_have_waited_in_one_place(
    monkeypatch: pytest.MonkeyPatch, seen: list[dict[int, Place]], found: bool
) -> None:
    peers, infos, left = PeersOfFailed(), [RankInfo(rank, "here", "10.0.0.1", rank) for rank in (0, 2)], list(seen)
    monkeypatch.setattr(module, "places_in_code", lambda asked: left.pop(0) if asked == infos else None)
    assert [peers.look(infos) for _ in seen] == [False] * (len(seen) - 1) + [found]


def test_ranks_are_ended_each_by_its_own_node_and_all_are_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "end_process", lambda pid, started: ended.append(("here", pid, started)))

    def call(node: str, function: Any, *given: Any) -> Ref:
        assert function is module.end_process
        ended.append((node, *given))
        return Ref(comes=node != "lost")

    monkeypatch.setattr(module, "call_on_node", call)
    infos = [RankInfo(rank, node, "10.0.0.1", 10 + rank, str(rank)) for rank, node in enumerate(("there", "here", "lost"))]
    module.end_processes(infos)
    assert ended == [("there", 10, "0"), ("here", 11, "1"), ("lost", 12, "2")]
    assert module.ray.waits == [20.0]  # type: ignore[attr-defined]
    module.end_processes(infos[1:2])
    assert len(module.ray.waits) == 1, "of none there is nothing to wait for"  # type: ignore[attr-defined]


def test_one_that_is_stopped_for_too_long_is_told_before_those_that_are_silent_or_slow(clock: Clock) -> None:
    ranks, stopped = [Rank(), Rank(), Rank()], {1: 2.9, 2: 0.0}
    pulse = Pulse(ranks, BOUNDS, stopped)
    ranks[0].at = None
    assert looks(pulse, clock, 29) is None
    stopped[1] = stopped[2] = 3.0
    assert looks(pulse, clock, 30) == ([1, 2], "is stopped (SIGSTOP)")
    stopped[1] = stopped[2] = 0.0
    assert looks(pulse, clock, 30) == ([0], "has given no sign of life for 30 s")
