"""Segments of shared memory: who may read, write and remove them."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.wire import segment as module
from actors.wire.segment import (
    SharedSegment,
    drop_names,
    host_identity,
    map_segment,
    remove_stale_segments,
    shared_files,
)
from rl_backend.contracts import WeightSyncError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm."""
    monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    return tmp_path


@pytest.fixture
def ended() -> int:
    """A process that has ended and been waited for."""
    child = subprocess.Popen(["true"])
    child.wait(5)
    return child.pid


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that has ended and that nobody has waited for."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait(5)


def test_what_one_writes_the_other_reads_and_the_file_goes_with_its_owner(folder: Path) -> None:
    first, second = SharedSegment(5), SharedSegment(7)
    assert first.path != second.path and first.path.parent == folder
    assert (first.buffer.shape, first.buffer.dtype, first.nbytes) == ((5,), torch.uint8, 5)
    assert first.path.stat().st_size == 5 and first.path.stat().st_mode & 0o777 == 0o600
    seen = map_segment(str(first.path), 3)
    first.buffer.copy_(torch.arange(5))
    assert seen.tolist() == [0, 1, 2]
    seen[1] = 9
    assert first.buffer.tolist() == [0, 9, 2, 3, 4]
    first.close()
    assert not first.path.exists() and second.path.exists() and first.buffer.numel() == 0
    assert seen.tolist() == [0, 9, 2], "who has it keeps it"
    first.close()
    with pytest.raises(WeightSyncError) as caught:
        map_segment(str(first.path), 3)
    assert str(caught.value).startswith(f"shared-memory segment {first.path} does not exist here; trainer and engine do not")
    assert caught.value.details == {"path": str(first.path)}
    with pytest.raises(WeightSyncError, match=f"segment {second.path} has 7 bytes, expected 8"):
        map_segment(str(second.path), 8)
    assert map_segment(str(second.path), 7).shape == (7,)
    second.close()


def test_a_copy_in_a_child_leaves_the_file_to_its_owner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SharedSegment(4)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    made.close()
    assert made.path.exists()
    monkeypatch.setattr(os, "getpid", lambda: here)
    made.close()
    assert not made.path.exists()


def test_a_segment_is_removed_when_python_ends_unless_it_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    stand_in = SimpleNamespace(register=registered.append, unregister=registered.remove)
    monkeypatch.setattr(module, "atexit", stand_in)
    made = SharedSegment(4)
    (at_exit,) = registered
    at_exit()
    assert not made.path.exists() and registered == []


def name(namespace: str, pid: int, start: str, number: int = 3) -> str:
    return f"rl_backend_weights-{namespace}-{pid}-{start}-{number}"


def test_segments_whose_owners_have_ended_are_removed(
    folder: Path, ended: int, zombie: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, own, start = module._namespace(), os.getpid(), module.start_time(os.getpid())
    assert here.isdigit() and start.isdigit()
    stale = [
        name(here, ended, "5"),
        name(here, own, str(int(start) + 1), 12),
        name(here, zombie, Path(f"/proc/{zombie}/stat").read_text().rpartition(")")[2].split()[19]),
    ]
    kept = [
        name(here, own, start),
        name(f"{here}1", ended, "5"),
        f"{name(here, ended, '5')}.tmp",
        f"rl_backend_weights-{here}-{ended}",
        f"other-{here}-{ended}-5-3",
    ]
    for each in (*stale, *kept):
        (folder / each).touch()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert remove_stale_segments() == [], "those of others are theirs"
    monkeypatch.undo()
    monkeypatch.setattr(module, "DIRECTORY", folder)
    assert sorted(remove_stale_segments()) == sorted(folder / each for each in stale)
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
    (folder / stale[0]).touch()
    made = SharedSegment(2)
    assert not (folder / stale[0]).exists(), "whoever makes one removes those that are left first"
    made.close()


def test_a_process_is_known_by_when_it_started(ended: int, zombie: int) -> None:
    child = subprocess.Popen(["sleep", "30"])
    try:
        # The 22nd field of the line; none before it holds a space here.
        assert module.start_time(child.pid) == Path(f"/proc/{child.pid}/stat").read_text().split()[21]
    finally:
        child.kill()
        child.wait(5)
    assert module.start_time(ended) == module.start_time(zombie) == ""


def test_a_segment_that_does_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3 * 2**20
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=3 * 256, f_bfree=10**9, f_frsize=4096))
    SharedSegment(free).close()
    with pytest.raises(WeightSyncError) as caught:
        SharedSegment(free + 2**21)
    assert str(caught.value).startswith("/dev/shm has 3 MiB free, but staging the weights takes 5 MiB: enlarge it")
    assert caught.value.details == {"free": free, "needed": free + 2**21}
    with pytest.raises(WeightSyncError):
        SharedSegment(free + 1)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "raised"), [(errno.ENOSPC, WeightSyncError), (errno.ENOMEM, WeightSyncError), (errno.EIO, OSError)]
)
def test_memory_that_cannot_be_reserved_leaves_no_file(
    folder: Path, code: int, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def refuse(descriptor: int, offset: int, length: int) -> None:
        opened.append(descriptor)
        assert (offset, length) == (0, 64)
        raise OSError(code, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(raised):
        SharedSegment(64)
    assert list(folder.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_host_without_shared_memory_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIRECTORY", folder / "nowhere")
    with pytest.raises(WeightSyncError, match=r"^/dev/shm does not exist on this host: mount a tmpfs there or use"):
        SharedSegment(4)


def test_a_host_is_its_kernel_and_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_identity() == f"{boot}:{os.stat('/dev/shm').st_dev}"
    monkeypatch.setattr(module, "DIRECTORY", Path("/proc"))
    assert host_identity() == f"{boot}:{os.stat('/proc').st_dev}"


def test_names_of_sockets_of_workers_go_and_those_who_are_connected_talk_on(tmp_path: Path) -> None:
    named, other = tmp_path / str(uuid.uuid4()), tmp_path / "ours"
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as kept,
        socket.socket(socket.AF_UNIX) as end,
    ):
        listener.bind(str(named))
        kept.bind(str(other))
        for each in (listener, kept):
            each.listen()
        end.connect(str(named))
        assert drop_names([2**30, os.getpid()]) == {named} and not named.exists() and other.exists()
        answers, _ = listener.accept()
        with answers:
            end.sendall(b"x")
            assert answers.recv(1) == b"x"


@pytest.mark.parametrize("name", [None, "rl_backend_weights-1-2-3-4-tp:0-[0-1]-cpushm_0"])
def test_names_of_shared_memory_go_and_the_memory_stays_until_its_processes_end(name: str | None) -> None:
    memory, own = SharedMemory(name, create=True, size=4096), SharedSegment(8)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    try:
        path = Path("/dev/shm") / memory.name
        assert {path, own.path} <= shared_files(os.getpid()) and shared_files(2**30) == set()
        assert drop_names([2**30, os.getpid()]) == {path} and not path.exists() and own.path.exists()
        assert path not in shared_files(os.getpid())
        memory.buf[0] = 7
        assert memory.buf[0] == 7 and drop_names([os.getpid()]) == set()
    finally:
        memory.close()
        own.close()


def test_a_process_that_is_about_to_end_removes_all_that_is_its_own(folder: Path) -> None:
    made, reserved = SharedSegment(4), module.owned_name()
    reserved.touch()
    others = [folder / name(module._namespace(), os.getpid() + 10**7, "5"), folder / "other"]
    for each in others:
        each.touch()
    assert made.path.parent == reserved.parent == folder and made.path != reserved
    module.remove_own()
    assert sorted(folder.iterdir()) == sorted(others)
    module.remove_own()
    made.close()


def test_a_segment_that_another_process_removes_first_holds_nothing_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "there").touch()
    monkeypatch.setattr(module, "stale_segments", lambda: [folder / "gone", folder / "there"])
    assert remove_stale_segments() == [folder / "there"] and list(folder.iterdir()) == []
