"""What a driver ends when Ray is lost: the processes of a Ray that it has started, and none of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest

from actors.cluster import ray_watch
from rl_backend.contracts import ClusterLostError


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that this one has started, and Ray knows nothing of."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those sent to the main thread."""
    sent: list[int] = []
    monkeypatch.setattr(ray_watch.signal, "pthread_kill", lambda thread, number: sent.append(number))
    monkeypatch.setattr(ray_watch, "_loss", [])
    return sent


def watch_of(monkeypatch: pytest.MonkeyPatch, *, ours: bool) -> ray_watch._Watch:
    checks = {"raylet": lambda: "its raylet has ended"}
    monkeypatch.setattr(ray_watch, "_local_checks", lambda: checks if ours else {})
    monkeypatch.setattr(ray_watch, "_remote_checks", lambda: checks)
    return ray_watch._Watch()


@pytest.mark.parametrize("ours", [True, False])
def test_children_are_ended_with_a_ray_that_was_started_here_and_with_no_other(
    ours: bool, child: subprocess.Popen[bytes], signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(monkeypatch, ours=ours)
    # Of this process's children the test may lose its own alone.
    known = ray_watch._descendants
    monkeypatch.setattr(ray_watch, "_descendants", lambda: {child.pid: known()[child.pid]})
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS_ELSEWHERE", 0.0)
    monkeypatch.setattr(watch._stopped, "wait", lambda seconds: seconds == ray_watch.END_SECONDS)
    watch._run()
    assert signals == [signal.SIGINT] and watch.pending() and not watch.pending()
    assert "its raylet has ended" in str(watch.error()) and ray_watch.cluster_loss() is watch.error()
    if ours:
        assert child.wait(10) == -signal.SIGKILL
    else:
        assert child.poll() is None


def test_a_number_that_another_process_has_by_now_is_not_ended(
    child: subprocess.Popen[bytes], signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(monkeypatch, ours=True)
    monkeypatch.setattr(ray_watch, "_descendants", lambda: {child.pid: "started at another time"})
    watch.stop()
    watch._end("its raylet has ended")
    assert child.poll() is None and isinstance(watch.error(), ClusterLostError)


def test_descendants_are_children_and_theirs() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        found = ray_watch._descendants()
        assert {parent.pid, grandchild} <= found.keys()
        assert all(ray_watch._started(pid) == found[pid] for pid in (parent.pid, grandchild))
        subprocess.run(["kill", str(grandchild), str(parent.pid)], check=True)
