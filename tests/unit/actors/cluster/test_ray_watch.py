"""What a driver ends when Ray is lost: the processes of a Ray that it has started, and none of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster import ray_watch
from actors.cluster.processes import Process, descendants
from rl_backend.contracts import ClusterLostError, RLBackendError


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
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, number: sent.append(number))
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
    known = ray_watch.descendants
    monkeypatch.setattr(ray_watch, "descendants", lambda: {each for each in known() if each.pid == child.pid})
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS_ELSEWHERE", 0.0)
    monkeypatch.setattr(watch._stopped, "wait", lambda seconds: seconds == ray_watch.END_SECONDS)
    watch._run()
    assert signals == [signal.SIGINT] and watch.pending() and not watch.pending()
    assert "its raylet has ended" in str(watch.error()) and ray_watch.cluster_loss() is watch.error()
    if ours:
        assert child.wait(10) == -signal.SIGKILL
    else:
        with pytest.raises(subprocess.TimeoutExpired):  # a process that is killed ends a moment later
            child.wait(0.3)


def test_a_number_that_another_process_has_by_now_is_not_ended(
    child: subprocess.Popen[bytes], signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watch_of(monkeypatch, ours=True)
    monkeypatch.setattr(ray_watch, "descendants", lambda: {Process(child.pid, "another time")})
    watch.stop()
    watch._end("its raylet has ended")
    assert child.poll() is None and isinstance(watch.error(), ClusterLostError)


def test_descendants_are_children_and_theirs() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        grandchild = int(parent.stdout.readline())
        assert {Process.of(parent.pid), Process.of(grandchild)} <= descendants()
        subprocess.run(["kill", str(grandchild), str(parent.pid)], check=True)


def test_a_server_elsewhere_is_lost_when_it_has_not_answered_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(ray_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    check = ray_watch._Port("the raylet", address)
    assert check() == ""
    server.close()
    for later in (0.0, ray_watch._PATIENCE - 0.1):
        now[0] = 200.0 + later
        assert check() == ""
    with socket.create_server(address):
        now[0] = 300.0
        assert check() == "", "a hiccup of the network"
    assert check() == ""
    now[0] += ray_watch._PATIENCE
    assert check().startswith(f"the raylet at 127.0.0.1:{address[1]} has not answered for 10 s (")


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_that_follows_from_the_loss_of_ray_is_told_as_the_loss(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch, ours=True)
    if not lost:
        watch._checks = {}
    monkeypatch.setattr(ray_watch, "_loss", [])
    monkeypatch.setattr(ray_watch, "_Watch", lambda: watch)
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 1000.0)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ClusterLostError if lost else ValueError) as raised, ray_watch.watch_cluster():
        raise ValueError("a rank has gone")
    assert isinstance(raised.value.__cause__, ValueError) == lost
    assert signal.getsignal(signal.SIGINT) is before
    watch.thread.join(10)
    assert not watch.thread.is_alive()


def test_ctrl_c_stays_what_it_is_while_ray_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch, ours=True)
    watch._checks = {}
    monkeypatch.setattr(ray_watch, "_Watch", lambda: watch)
    with pytest.raises(KeyboardInterrupt), ray_watch.watch_cluster():
        signal.raise_signal(signal.SIGINT)


def test_a_loss_interrupts_what_the_main_thread_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(monkeypatch, ours=True)
    monkeypatch.setattr(ray_watch, "_loss", [])
    monkeypatch.setattr(ray_watch, "_Watch", lambda: watch)
    monkeypatch.setattr(ray_watch, "descendants", set)
    monkeypatch.setattr(ray_watch, "_POLL_SECONDS", 0.01)
    with pytest.raises(ClusterLostError, match="its raylet has ended"), ray_watch.watch_cluster():
        time.sleep(60)


def test_the_servers_of_a_cluster_elsewhere_are_asked_at_their_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": f"10.0.0.{place}", "NodeManagerPort": 100 + place}
        for place, name in enumerate(("x", "here", "y"))
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    for address, host in (("10.0.0.9:6379", "10.0.0.9"), ("[fe80::1]:6379", "fe80::1")):
        context = SimpleNamespace(get_node_id=lambda: "here", gcs_address=address)
        monkeypatch.setattr(ray, "get_runtime_context", lambda context=context: context)
        checks: Any = ray_watch._remote_checks()
        assert list(checks) == ["gcs_server", "raylet"]
        assert checks["gcs_server"]._address == (host, 6379) and checks["raylet"]._address == ("10.0.0.1", 101)


@pytest.mark.parametrize("started", [True, False])
def test_the_servers_that_this_process_started_are_asked_themselves(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {"gcs_server": None, "raylet": 3, "dashboard": 1}
    processes = {
        name: [SimpleNamespace(process=SimpleNamespace(poll=lambda code=code: code, returncode=code))]
        for name, code in ended.items()
    }
    node = SimpleNamespace(all_processes={**processes, "log_monitor": []}) if started else None
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    found = {name: check() for name, check in ray_watch._local_checks().items()}
    said = {"gcs_server": "", "raylet": "its raylet on this machine ended with status 3"}
    assert found == (said if started else {})


def test_both_servers_are_named_where_both_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_local_checks", lambda: {"a": lambda: "one", "b": lambda: "", "c": lambda: "two"})
    monkeypatch.setattr(ray_watch, "_loss", [RLBackendError("of an earlier run")])
    watch = ray_watch._Watch()
    assert ray_watch.cluster_loss() is None, "a new watch forgets the loss of an earlier one"
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert ray_watch.ray_is_usable() and watch.found() and not watch.pending(), "who asks has been told"
    assert not ray_watch.ray_is_usable() and str(watch.error()).startswith(
        "Ray is lost: one and two; the run cannot continue"
    )
    assert watch.error().details == {"reason": "one and two"} and watch.found()
    assert len(ray_watch._loss) == 1


def test_a_process_that_was_seen_once_is_ended_though_ray_no_more_leads_to_it(
    child: subprocess.Popen[bytes], signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, left, looks = watch_of(monkeypatch, ours=True), [0] * 25, [0]

    def family() -> set[Process]:
        # Its parent has gone by the time of the loss.
        looks[0] += 1
        return {Process.of(child.pid)} if looks[0] == 1 else set()

    watch._checks = {"raylet": lambda: "" if left else "its raylet has ended"}
    monkeypatch.setattr(ray_watch, "descendants", family)
    monkeypatch.setattr(
        watch._stopped, "wait", lambda seconds: seconds == ray_watch.END_SECONDS or bool(left and left.pop())
    )
    watch._run()
    assert child.wait(10) == -signal.SIGKILL
    assert looks == [1 + 2 + 1], "at looks 0, 10 and 20, and at the end"


@pytest.mark.parametrize(("ours", "seconds"), [(True, 0.5), (False, 2.0)])
def test_servers_elsewhere_are_asked_more_seldom(
    ours: bool, seconds: float, signals: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, waits = watch_of(monkeypatch, ours=ours), list[float]()

    def wait(given: float) -> bool:
        waits.append(given)
        return True

    monkeypatch.setattr(watch._stopped, "wait", wait)
    watch._run()
    assert waits == [seconds] and not signals


def test_in_another_thread_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_Watch", lambda: pytest.fail("it is watched"))
    before, seen = signal.getsignal(signal.SIGINT), list[Any]()

    def elsewhere() -> None:
        with ray_watch.watch_cluster():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert seen == [before]


@pytest.mark.parametrize("hooks", [0, 2])
def test_a_run_that_does_not_end_is_ended_after_all_that_want_to_say_so(
    hooks: int, signals: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, said = watch_of(monkeypatch, ours=False), list[Any]()

    def fails(error: ClusterLostError) -> None:
        said.append(error)
        raise KeyError("no")

    monkeypatch.setattr(ray_watch, "exit_hooks", [fails, said.append][:hooks])
    monkeypatch.setattr(ray_watch.os, "_exit", said.append)
    monkeypatch.setattr(watch._stopped, "wait", lambda seconds: False)
    watch._end("its raylet has ended")
    assert said == [watch.error()] * hooks + [2]
    assert capsys.readouterr().err == f"error: {watch.error()}\n"
