"""Shared memory of adapters: no two versions that engines may read are in the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.group.adapters import AdapterMemory
from actors.wire.factors import FactorMemories
from actors.wire.segment import DIRECTORY, Segment, SharedSegment
from rl_backend.contracts import WeightSyncError


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Calls of engines that have ended."""
    calls: set[str] = set()

    def wait(asked: Sequence[str], *, num_returns: int, timeout: float, fetch_local: bool) -> tuple[list[str], list[str]]:
        assert num_returns == len(asked) and timeout == 0
        return [call for call in asked if call in calls], [call for call in asked if call not in calls]

    monkeypatch.setattr("actors.rollout.group.adapters.ray.wait", wait)
    return calls


@pytest.fixture
def memory(ended: set[str]) -> Iterator[AdapterMemory]:
    made = AdapterMemory()
    yield made
    made.close()


def test_memory_is_used_again_once_every_engine_has_dropped_what_was_in_it(memory: AdapterMemory, ended: set[str]) -> None:
    first = memory.take(1000)
    memory.give_back(first.path, ["drop on 0", "drop on 1"])
    second = memory.take(1000)
    assert second.path != first.path
    ended.add("drop on 0")
    third = memory.take(1000)
    assert third.path not in (first.path, second.path), "engine 1 may still read it"
    ended.add("drop on 1")
    assert memory.take(1000) == first


def test_memory_that_is_too_small_is_not_taken_and_the_smallest_that_fits_is(memory: AdapterMemory) -> None:
    small, large = memory.take(1000), memory.take(5000)
    for segment in (large, small):
        memory.give_back(segment.path, [])
    assert memory.take(2000) == large and memory.take(900) == small
    assert memory.take(900) not in (small, large)


def test_memory_that_somebody_may_write_to_is_not_used_again(memory: AdapterMemory) -> None:
    first = memory.take(1000)
    memory.discard(first.path)
    assert not Path(first.path).exists() and memory.take(1000).path != first.path


def test_few_segments_are_kept_and_none_after_the_end(memory: AdapterMemory, ended: set[str]) -> None:
    taken = [memory.take(1000) for _ in range(6)]
    for segment in taken[:4]:
        memory.give_back(segment.path, [])
    memory.give_back(taken[4].path, ["never ends"])
    assert memory.take(1000) in taken[2:4], "those that were given back last stay"
    assert [Path(segment.path).exists() for segment in taken] == [False, False, True, True, True, True]
    memory.close()
    assert not any(Path(segment.path).exists() for segment in taken)
    memory.give_back(taken[5].path, [])
    memory.discard(taken[3].path)
    with pytest.raises(WeightSyncError, match="the rollout group is closed"):
        memory.take(1000)


def test_an_interrupted_look_at_calls_puts_no_memory_into_two_hands(
    memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = [memory.take(1000) for _ in range(2)]
    memory.give_back(taken[0].path, ["never ends"])
    with monkeypatch.context() as patch:
        patch.setattr("actors.rollout.group.adapters.ray.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.give_back(taken[1].path, [])
    paths = [memory.take(1000).path for _ in range(3)]
    assert len(set(paths)) == 3 and taken[0].path not in paths


def interrupted(*_: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def test_half_of_the_memory_stays_free(memory: AdapterMemory) -> None:
    space = os.statvfs(DIRECTORY)
    with pytest.raises(WeightSyncError, match=r"/dev/shm would have .* MiB free, less than 50% of it"):
        memory.take(space.f_blocks * space.f_frsize // 2 + 1)
    assert memory.take(1000).nbytes == 1000


def test_memory_is_mapped_for_as_long_as_its_file_exists() -> None:
    segments = [SharedSegment(64) for _ in range(2)]
    try:
        places = [Segment(str(each.path), each.nbytes) for each in segments]
        memories: Any = FactorMemories()
        first = memories.at(places[0])
        assert memories.at(places[0]) is first and memories.at(None) is memories.at(None)
        segments[0].close()
        memories.at(places[1])
        assert set(memories._mapped) == {places[1].path}
        with pytest.raises(WeightSyncError, match="does not exist here"):
            memories.at(places[0])
    finally:
        for each in segments:
            each.close()
