"""The Ray session of a run, without Ray: what is started or joined, with what, and what SIGTERM makes of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray._private import ray_constants

from actors.cluster import session
from actors.cluster.session import RunTerminated, raise_if_terminated, raised_on_sigterm, ray_session, termination
from rl_backend.contracts import ClusterLostError, ConfigError

NICENESS, PRESTART = "RAY_worker_niceness", "RAY_prestart_worker_first_driver"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is asked of Ray, in order."""
    asked: list[tuple[str, Any]] = []

    @contextmanager
    def watched() -> Iterator[None]:
        asked.append(("watch", None))
        try:
            yield
        finally:
            asked.append(("watched", None))

    monkeypatch.setattr(session, "init_local_ray", lambda **options: asked.append(("init", options)))
    monkeypatch.setattr(session, "join_ray", lambda address, **options: asked.append(("join", (address, options))))
    monkeypatch.setattr(session, "watch_cluster", watched)
    monkeypatch.setattr(session, "ray_is_usable", lambda: True)
    monkeypatch.setattr(session, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: asked.append(("shutdown", None)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "_received", [])
    return asked


@pytest.mark.parametrize(("ranks", "engines", "cpus"), [(2, 1, 8), (6, 1, 10), (1, 7, 11), (5, 6, 11), (1, 0, 8)])
def test_ray_that_is_started_here_counts_all_cores_for_ranks_and_for_engines(
    fake: list[tuple[str, Any]], ranks: int, engines: int, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    with ray_session(ranks, engines):
        assert [name for name, _ in fake] == ["init", "watch"]
    assert fake[0][1] == {
        "num_cpus": cpus, "num_gpus": 3, "include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR,
    }  # fmt: skip
    assert [name for name, _ in fake] == ["init", "watch", "watched", "shutdown"]
    assert os.environ.pop("RAY_USAGE_STATS_ENABLED") == "0"


def test_a_cluster_that_is_named_is_joined_and_a_session_that_is_there_is_left(
    fake: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    with ray_session(1):
        pass
    assert fake[0] == ("join", ("head:6379", {"log_to_driver": False, "logging_level": logging.ERROR}))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1", "what the user has set is kept"
    fake.clear()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    before = signal.getsignal(signal.SIGTERM)
    with ray_session(1):
        assert signal.getsignal(signal.SIGTERM) is session._terminate
    assert fake == [] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("error", [ConnectionError("nobody"), RuntimeError("token"), ray.exceptions.RayError("gone")])
def test_a_cluster_that_does_not_answer_is_named(
    fake: list[tuple[str, Any]], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(address: str, **_: Any) -> None:
        raise error

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(session, "join_ray", refuses)
    with pytest.raises(ConfigError, match=rf"^RAY_ADDRESS='head:6379': {error}; check that it is the head node's"):
        ray_session(1).__enter__()
    assert fake == []


@pytest.mark.parametrize(("code", "kind"), [(signal.SIGTERM, RunTerminated), (1, SystemExit)])
def test_an_exit_while_ray_starts_is_a_termination_only_of_sigterm(
    fake: list[tuple[str, Any]], code: int, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaves(**_: Any) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(session, "init_local_ray", leaves)
    with pytest.raises(kind):
        ray_session(1).__enter__()
    assert fake == []


@pytest.mark.parametrize("failures", [2, 3])
@pytest.mark.shows("failures: a Ray that does not start on this machine is started again, three times at most")
def test_ray_that_does_not_start_is_started_again(
    fake: list[tuple[str, Any]], failures: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    def starts(**_: Any) -> None:
        if fake.count(("shutdown", None)) < failures:
            raise RuntimeError("Failed to start GCS")
        fake.append(("init", None))

    monkeypatch.setattr(session, "init_local_ray", starts)
    monkeypatch.setattr(session.time, "sleep", pauses.append)
    if failures == 2:
        with ray_session(1):
            assert [name for name, _ in fake] == ["shutdown", "shutdown", "init", "watch"]
    else:
        with pytest.raises(ClusterLostError, match=r"could not be started on this machine: .*GCS, 3 times"):
            ray_session(1).__enter__()
    assert pauses == [2.0, 8.0]
    assert "it is tried again in 2 s" in caplog.records[0].message and len(caplog.records) == 2


@pytest.mark.parametrize("usable", [True, False])
def test_ray_is_shut_down_after_an_error_too_unless_it_is_gone(
    fake: list[tuple[str, Any]], usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ray_is_usable", lambda: usable)
    with pytest.raises(ValueError, match="mine"), ray_session(1):
        raise ValueError("mine")
    assert (fake[-1][0] == "shutdown") == usable


def terminated_twice() -> None:
    with raised_on_sigterm():
        with pytest.raises(RunTerminated), raised_on_sigterm():
            signal.raise_signal(signal.SIGTERM)
        assert isinstance(termination(), RunTerminated), "the inner one has ended, the run has not"
        signal.raise_signal(signal.SIGTERM)  # sent to the group too: it must not cut the clean-up short
        raise_if_terminated()


def test_sigterm_is_raised_once_and_remembered_until_the_outermost_ends(fake: list[tuple[str, Any]]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert termination() is None
    raise_if_terminated()
    with pytest.raises(RunTerminated, match=r"^SIGTERM$"):
        terminated_twice()
    assert signal.getsignal(signal.SIGTERM) is before and termination() is None
    raise_if_terminated()
    assert str(RunTerminated("after step 3")) == "SIGTERM after step 3"


def test_a_second_sigterm_much_later_is_raised_again(fake: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(RunTerminated):
        session._terminate(15, None)
    now[0] += session._REPEATED_SECONDS - 0.1
    session._terminate(15, None)
    now[0] += 0.1
    with pytest.raises(RunTerminated):
        session._terminate(15, None)
    # Sent to the process and to its group at once: the clean-up of the second goes on.
    now[0] += 0.1
    session._terminate(15, None)
    monkeypatch.setattr(session, "_received", [])


def interrupted_by_sigterm() -> None:
    """As Ray's calls are, which raise a plain KeyboardInterrupt then."""
    with raised_on_sigterm():
        try:
            signal.raise_signal(signal.SIGTERM)
        except RunTerminated:
            raise KeyboardInterrupt from None


def test_what_comes_of_a_sigterm_is_the_sigterm(fake: list[tuple[str, Any]]) -> None:
    with pytest.raises(RunTerminated) as raised:
        interrupted_by_sigterm()
    assert isinstance(raised.value.__cause__, KeyboardInterrupt)
    with pytest.raises(KeyError), raised_on_sigterm():
        raise KeyError("mine")
    caught: list[Any] = []

    def elsewhere() -> None:
        with raised_on_sigterm():
            caught.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(10)
    assert caught == [before], "outside of the main thread nothing changes"


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", "as before")
    return ray_constants


@pytest.mark.parametrize("fails", [False, True])
def test_ray_of_one_machine_is_started_with_its_own_switch(
    constants: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    entered: list[str] = []

    def init(**options: Any) -> None:
        seen.append((options, constants.ENABLE_RAY_CLUSTER, list(entered)))
        if fails:
            raise RuntimeError("no")

    @contextmanager
    def own_process_groups() -> Iterator[None]:
        entered.append("in")
        yield

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(session, "own_process_groups", own_process_groups)
    for name in (NICENESS, PRESTART):
        monkeypatch.delenv(name, raising=False)
    if fails:
        with pytest.raises(RuntimeError, match="no"):
            session.init_local_ray(num_cpus=3)
    else:
        session.init_local_ray(num_cpus=3)
    assert seen == [({"address": "local", "num_cpus": 3}, False, ["in"])]
    assert constants.ENABLE_RAY_CLUSTER == "as before"
    assert os.environ[NICENESS] == "0", "a run would get what other programs leave"
    assert os.environ[PRESTART] == "0", "ranks and engines would start beside as many workers that none of them takes"
    for name in (NICENESS, PRESTART):
        monkeypatch.setenv(name, "7")
    with suppress(RuntimeError):
        session.init_local_ray()
    assert os.environ[NICENESS] == os.environ[PRESTART] == "7"


@pytest.mark.parametrize(
    ("host", "listens_on", "alone"),
    [
        ("127.0.0.1", ["127.0.0.1"], True),
        ("localhost", ["127.0.0.1"], True),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.2"], False),
        ("127.0.0.1", [], False),
        ("127.0.0.3", ["127.0.0.3"], False),
    ],
)
def test_a_ray_that_answers_on_the_loopback_address_alone_is_joined_as_one_machine(
    constants: Any, host: str, listens_on: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(ray, "init", lambda **options: seen.append((options, constants.ENABLE_RAY_CLUSTER)))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with socket.create_server(("127.0.0.9", 0)) as free:
        port = free.getsockname()[1]
        servers = [socket.create_server((each, port)) for each in listens_on]
        try:
            session.join_ray(f"{host}:{port}", namespace="x")
        finally:
            for server in servers:
                server.close()
    assert seen == [({"address": f"{host}:{port}", "namespace": "x"}, False if alone else "as before")]
    assert constants.ENABLE_RAY_CLUSTER == "as before"
    seen.clear()
    for address in ("auto", "127.0.0.1", "127.0.0.1:x", "ray://127.0.0.1:1"):
        session.join_ray(address)
        assert seen.pop() == ({"address": address}, "as before")


@pytest.mark.parametrize("before", [None, "of an outer run"])
def test_only_what_ray_starts_knows_the_driver(constants: Any, before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def init(**_: Any) -> None:
        seen.append(os.environ.get(session.DRIVER))
        if len(seen) == 2:
            raise RuntimeError("no")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(session, "driver_mark", lambda: "this driver")
    if before is None:
        monkeypatch.delenv(session.DRIVER, raising=False)
    else:
        monkeypatch.setenv(session.DRIVER, before)
    session.init_local_ray()
    assert os.environ.get(session.DRIVER) == before
    with pytest.raises(RuntimeError):
        session.init_local_ray()
    assert os.environ.get(session.DRIVER) == before and seen == ["this driver"] * 2


def test_ray_that_is_started_again_is_started_with_the_same_options(
    fake: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def starts(**options: Any) -> None:
        asked.append(options)
        if len(asked) == 1:
            raise RuntimeError("busy")

    monkeypatch.setattr(session, "init_local_ray", starts)
    monkeypatch.setattr(session.time, "sleep", lambda _: None)
    with ray_session(2, 1):
        assert len(asked) == 2 and asked[0] == asked[1] and asked[0]["num_cpus"] == 8
