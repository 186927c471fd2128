"""Memory that outlives the process that wrote it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.wire import held_memory
from actors.wire.held_memory import HeldKey, MemoryHolder, Written, fetch, nameless_file

WRITER = """
import os, sys
from actors.wire.held_memory import nameless_file
descriptor, path = nameless_file(5000)
os.pwrite(descriptor, bytes(range(250)) * 20, 0)
print(path, flush=True)
sys.stdin.read()
"""


class Handle:
    """A holder of this process, as an actor's handle."""

    def __init__(self, holder: MemoryHolder) -> None:
        self.holder = holder
        self.read = SimpleNamespace(remote=holder.read)


@pytest.fixture(autouse=True)
def _without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory, "ray", SimpleNamespace(get=lambda value: value))
    monkeypatch.setattr(held_memory, "_CHUNK", 1024)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_of_a_process_that_is_killed_stays_and_is_freed_with_the_holder() -> None:
    before, holder, key = open_files(), MemoryHolder(), HeldKey(3, 1, 17)
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=-1, stdout=-1, text=True) as writer:
        assert writer.stdout is not None
        path = writer.stdout.readline().strip()
        kept: Any = holder.keep(key, Written(path, 4000, 5000))
        writer.kill()
    assert not os.path.exists(path) and kept == Written(kept.path, 4000, 5000)
    expected = bytes(range(250)) * 20
    assert Path(kept.path).read_bytes() == expected and holder.read(key, 100, 300).tobytes() == expected[100:300]
    other = MemoryHolder()
    pulled: Any = other.pull(key, Handle(holder), kept)
    holder.drop(3, 18)
    assert Path(pulled.path).read_bytes() == expected
    assert fetch(Handle(other), key, 999, 4999).tobytes() == expected[999:4999]
    other.drop(4, 18)
    other.drop(3, 17)
    assert other.read(key, 0, 2).tolist() == [0, 1]
    other.drop(3, 18)
    assert open_files() == before and holder.ping()[0] == os.getpid()


def test_holders_that_pull_from_each_other_answer_on_threads_that_no_pull_takes() -> None:
    methods: Any = MemoryHolder
    assert {methods.ping.__ray_concurrency_group__, methods.read.__ray_concurrency_group__} == {held_memory.ANSWERS}
    assert not any(hasattr(each, "__ray_concurrency_group__") for each in (methods.pull, methods.keep, methods.drop))


def test_a_problem_is_passed_on() -> None:
    holder, key = MemoryHolder(), HeldKey(1, 0, 1)
    assert [holder.keep(key, each) for each in ("no room", None)] == ["no room", None]
    assert [holder.pull(key, None, each) for each in ("no room", None)] == ["no room", None]
    with pytest.raises(FileNotFoundError):
        holder.keep(key, Written("/proc/1/fd/no", 0, 0))


def test_what_is_dropped_while_it_is_copied_is_not_held_and_spoils_nothing_else() -> None:
    before, holder, other = open_files(), MemoryHolder(), MemoryHolder()
    source, path = nameless_file(5000)
    os.pwrite(source, b"a" * 5000, 0)
    key, of_another, late = HeldKey(3, 0, 17), HeldKey(4, 0, 20), HeldKey(3, 0, 16)
    held: Any = holder.keep(key, Written(path, 4000, 5000))
    chunks = Handle(holder)

    def read(key: HeldKey, start: int, end: int) -> Any:
        if start == 1024:
            other.drop(3, 18)
            zeros, its_path = nameless_file(5000)
            other.keep(of_another, Written(its_path, 4000, 5000))
            os.close(zeros)
        return holder.read(key, start, end)

    chunks.read = SimpleNamespace(remote=read)
    other.pull(key, chunks, held)
    assert list(other._files) == [of_another] and other.read(of_another, 0, 5000).tobytes() == bytes(5000)
    other.keep(late, Written(path, 4000, 5000))
    assert list(other._files) == [of_another]
    with pytest.raises(KeyError):  # the other holder has no such file any more
        other.pull(HeldKey(5, 0, 21), Handle(holder), held)
    holder.drop(3, 18)
    other.drop(4, 21)
    os.close(source)
    assert open_files() == before


def test_what_was_dropped_once_is_not_held_later_whatever_is_dropped_meanwhile() -> None:
    before, holder = open_files(), MemoryHolder()
    source, path = nameless_file(10)

    def keep(model: int, number: int) -> bool:
        holder.keep(HeldKey(model, 0, number), Written(path, 4, 10))
        return HeldKey(model, 0, number) in holder._files

    holder.drop(3, 18)
    holder.drop(3, 16)
    assert [keep(3, number) for number in (16, 17, 18, 19)] == [False, False, True, True]
    assert keep(4, 1), "another model's"
    holder.drop(3, float("inf"))
    assert not keep(3, 10**9) and holder._files.keys() == {HeldKey(4, 0, 1)}
    holder.drop(4, 2)
    os.close(source)
    assert open_files() == before


@pytest.mark.parametrize(("free", "fits"), [(100, True), (99, False)])
def test_a_copy_takes_memory_only_where_all_of_it_is_free(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_memory, "read_memory", lambda: (1000, free))
    holder, other, key = MemoryHolder(), MemoryHolder(), HeldKey(1, 0, 1)
    source, path = nameless_file(100)
    held: Any = holder.keep(key, Written(path, 50, 100))
    before = open_files()
    found: Any = other.pull(key, Handle(holder), held)
    assert isinstance(found, Written) is fits and open_files() == before + fits
    if fits:
        assert os.stat(found.path).st_size == 100 and (found.table, found.end) == (50, 100)
    else:
        assert found.startswith("no room there: ")
    for each in (holder, other):
        each.drop(1, 2)
    os.close(source)
