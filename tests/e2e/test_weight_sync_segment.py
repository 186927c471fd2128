"""Shared-memory segments do not outlive their owners."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.wire.segment import DIRECTORY, SharedSegment, map_segment, remove_stale_segments
from rl_backend.contracts import WeightSyncError

_OWNER = """
from actors.wire.segment import SharedSegment
segment = SharedSegment(4096)
print(segment.path, flush=True)
input()
"""


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_what_one_process_writes_another_mapping_sees_without_a_copy() -> None:
    segment = SharedSegment(1000)
    view = map_segment(str(segment.path), 1000)
    segment.buffer[999] = 7
    assert view[999] == 7
    segment.close()
    assert not segment.path.exists()
    assert view[999] == 7
    segment.close()


def test_segments_of_killed_processes_are_removed_and_those_of_living_ones_are_not() -> None:
    killed, stale = start_owner()
    living, kept = start_owner()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert stale.exists() and kept.exists()
    removed = remove_stale_segments()
    assert stale in removed and kept not in removed
    assert not stale.exists() and kept.exists()
    living.communicate("\n")
    assert living.returncode == 0
    assert not kept.exists()


def test_a_segment_of_a_killed_process_that_nobody_waits_for_is_removed() -> None:
    killed, stale = start_owner()
    killed.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert stale in remove_stale_segments()
    assert not stale.exists()
    killed.wait()


def test_a_segment_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    killed, stale = start_owner()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: stale.stat().st_uid + 1)
        assert remove_stale_segments() == []
    assert stale.exists()
    assert stale in remove_stale_segments()


def test_a_segment_that_is_not_there_or_too_short_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"does not exist here.*use transport='gloo'"):
        map_segment(str(DIRECTORY / "rl_backend_weights-none"), 10)
    segment = SharedSegment(64)
    with pytest.raises(WeightSyncError, match="has 64 bytes, expected 65"):
        map_segment(str(segment.path), 65)
    segment.close()


def test_a_segment_larger_than_the_file_system_is_refused_and_leaves_nothing_behind() -> None:
    before = set(DIRECTORY.glob(f"rl_backend_weights-*-{os.getpid()}-*"))
    with pytest.raises(WeightSyncError, match="MiB free, but staging the weights takes"):
        SharedSegment(1 << 50)
    assert set(DIRECTORY.glob(f"rl_backend_weights-*-{os.getpid()}-*")) == before
