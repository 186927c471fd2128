"""Where the store of a job that the environment describes listens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from actors.cluster.rendezvous import with_free_port
from rl_backend.parallel import groups
from rl_backend.parallel.groups import LOOPBACK, host_store, job_store, prefer_loopback
from tests.support.listening import Listening, listening_sockets

TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Sets the environment of a job of one rank, without what gloo and NCCL are told."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "restored at the end")
        monkeypatch.delenv(name)

    def set_variables(host: str, port: int) -> None:
        for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": host, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def sockets_at(port: int) -> list[Listening]:
    return [each for each in listening_sockets([psutil.Process()]) if each.port == port]


@pytest.mark.shows("security: the store of a job with a loopback MASTER_ADDR listens on that address alone")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_a_job_of_this_machine_alone_has_its_store_on_the_loopback_address(
    describe: Callable[[str, int], None], host: str
) -> None:
    def meet(port: int) -> None:
        describe(host, port)
        store, rank, world_size = job_store(TIMEOUT)
        assert (rank, world_size) == (0, 1)
        assert [each.address for each in sockets_at(port)] == ["127.0.0.1" if host == "localhost" else host]
        store.set("key", "value")
        other = TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        assert other.num_keys() >= 1
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"

    with_free_port("127.0.0.1", meet)


def test_a_job_that_other_machines_may_join_has_its_store_where_they_reach_it(describe: Callable[[str, int], None]) -> None:
    def meet(port: int) -> None:
        describe("0.0.0.0", port)
        store, _, _ = job_store(TIMEOUT)
        store.set("key", "value")
        assert not sockets_at(port)[0].out_of_reach
        assert "GLOO_SOCKET_IFNAME" not in os.environ

    with_free_port("127.0.0.1", meet)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_store_that_this_process_serves_already_is_shared(describe: Callable[[str, int], None], ours_first: bool) -> None:
    def meet(port: int) -> None:
        describe("127.0.0.1", port)
        makers = [lambda: job_store(TIMEOUT)[0], lambda: next(rendezvous("env://", timeout=TIMEOUT))[0]]
        first, second = [make() for make in (makers if ours_first else reversed(makers))]
        first.set("one", "1")
        second.set("two", "2")
        assert len(sockets_at(port)) == 1
        assert job_store(TIMEOUT)[0].set("three", "3") is None

    with_free_port("127.0.0.1", meet)


def test_an_address_where_nothing_can_listen_is_named(
    describe: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe("127.0.0.1", 70_000)
    with pytest.raises(OverflowError, match=r"port must be 0-65535"):
        job_store(TIMEOUT)
    describe("192.0.2.1", 0)
    monkeypatch.setattr(groups, "_is_loopback", lambda host: True)
    with pytest.raises(OSError, match=r"while attempting to bind on address \('192\.0\.2\.1', 0\)"):
        job_store(TIMEOUT)


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_is_missing_is_named(
    describe: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    describe("127.0.0.1", 1)
    monkeypatch.delenv(missing)
    with pytest.raises(ValueError, match=rf"environment variable {missing} expected, but not set"):
        job_store(TIMEOUT)


def test_what_ranks_left_when_they_met_before_is_not_found_when_they_meet_again(
    describe: Callable[[str, int], None],
) -> None:
    def meet(port: int) -> None:
        describe("127.0.0.1", port)
        first, second = (job_store(TIMEOUT)[0] for _ in range(2))
        first.set("key", "old")
        assert not second.check(["key"])
        second.set("key", "new")
        assert (first.get("key"), second.get("key")) == (b"old", b"new")

    with_free_port("127.0.0.1", meet)


@pytest.mark.parametrize(
    ("rank", "agent", "interface"), [("1", None, "lo"), ("1", "False", "lo"), ("0", "True", None), ("1", "True", None)]
)
def test_ranks_that_serve_no_store_meet_at_that_of_the_first_or_of_their_agent(
    describe: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
    rank: str,
    agent: str | None,
    interface: str | None,
) -> None:
    asked: list[Any] = []

    def meet(url: str, *, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        asked.append((url, timeout))
        yield HashStore(), int(rank), 3

    monkeypatch.setattr(groups, "rendezvous", meet)
    describe("127.0.0.1", 1)
    monkeypatch.setenv("RANK", rank)
    if agent is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    store, *place = job_store(TIMEOUT)
    store.set("key", "value")
    assert place == [int(rank), 3] and asked == [("env://", TIMEOUT)]
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == interface


def test_an_interface_that_is_named_stays() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth3"}
    prefer_loopback(environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth3", "NCCL_SOCKET_IFNAME": "lo"}


def test_a_store_of_this_machine_listens_on_loopback_and_waits_as_long_as_it_is_told() -> None:
    store = host_store(timedelta(seconds=7))
    assert [each.address for each in sockets_at(store.port)] == [LOOPBACK] and store.timeout == timedelta(seconds=7)
    store.set("key", "value")
    assert TCPStore(LOOPBACK, store.port, is_master=False, timeout=TIMEOUT).get("key") == b"value"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("::2", False),
        ("0.0.0.0", False),
        ("node-1", False),
    ],
)
def test_an_address_of_this_machine_alone_is_known(host: str, loopback: bool) -> None:
    assert groups._is_loopback(host) is loopback
