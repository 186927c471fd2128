"""The door to a group's store: who lacks the secret is turned away, and who has it passes."""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import actors.cluster.tcp_proxy
from actors.cluster.rendezvous import Rendezvous, RendezvousPoint, RendezvousRoute, rendezvous_address
from actors.cluster.tcp_proxy import Gate, TcpProxy, _receive, pass_gate
from rl_backend.contracts import RLBackendError
from rl_backend.parallel.groups import LOOPBACK

ELSEWHERE = "127.0.0.2"
"""Stands for a node's address: not the one on which stores listen."""
TIMEOUT = timedelta(seconds=5)


@pytest.fixture
def point() -> Iterator[RendezvousPoint]:
    point = RendezvousPoint(ELSEWHERE, TIMEOUT)
    yield point
    point.close()


def store_at(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)


@pytest.mark.shows("security: a process without a group's secret is turned away before it reads or writes the store")
def test_a_joiner_without_the_secret_is_turned_away(point: RendezvousPoint) -> None:
    point.store.set("key", "value")
    gate = (point.rendezvous.host, point.rendezvous.port)
    for secret in (b"", secrets.token_bytes(32), point.rendezvous.secret[:-1]):
        with pytest.raises(RLBackendError, match=r"127\.0\.0\.2:\d+ turned this process away: it has another secret"):
            RendezvousRoute(Rendezvous(*gate, secret))
    with pytest.raises(Exception, match=r".*"):
        TCPStore(ELSEWHERE, point.rendezvous.port, is_master=False, timeout=timedelta(seconds=2)).get("key")


def test_the_store_itself_cannot_be_reached_on_the_nodes_address(point: RendezvousPoint) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ELSEWHERE, point.store.port), timeout=5)


def test_members_with_the_secret_share_the_store(point: RendezvousPoint) -> None:
    path = RendezvousRoute(point.rendezvous)
    one, other = store_at(path.port), store_at(path.port)
    waiting = threading.Thread(target=lambda: one.set("heard", other.get("late")))
    waiting.start()
    point.store.set("late", b"x" * 300_000)
    waiting.join(10)
    assert bytes(point.store.get("heard")) == b"x" * 300_000
    assert one.add("count", 2) + other.add("count", 3) == 7
    path.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, path.port), timeout=5)
    assert one.add("count", 0) == 5


def test_a_connection_that_the_gate_refuses_is_closed_and_later_ones_pass(
    point: RendezvousPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TcpProxy(LOOPBACK, (point.rendezvous.host, point.rendezvous.port), point.rendezvous.secret)
    refused: list[bool] = []

    def pass_or_refuse(*gate: Any) -> socket.socket:
        refused.append(len(refused) < 2)
        if refused[-1]:
            raise RLBackendError("the gate does not answer")
        return pass_gate(*gate)

    monkeypatch.setattr(actors.cluster.tcp_proxy, "pass_gate", pass_or_refuse)
    open_before = None
    for number in range(4):
        if number < 2:
            with socket.create_connection((LOOPBACK, path.port), timeout=5) as connection:
                assert connection.recv(1) == b""
        else:
            store = store_at(path.port)
            assert store.add("count", 1) == number - 1
            open_before = open_before or store
    path.close()
    assert open_before is not None and open_before.add("count", 1) == 3


def test_something_else_that_answers_in_the_gates_place_is_not_trusted() -> None:
    with socket.create_server((LOOPBACK, 0)) as impostor:

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b"0" * 32)
                connection.recv(1024)
                connection.sendall(hmac.digest(b"a guess", b"", "sha256"))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RLBackendError, match="does not know this group's secret: something else answers there"):
            pass_gate(impostor.getsockname()[:2], b"secret")
        thread.join()


def test_a_proof_that_was_overheard_is_worth_nothing(point: RendezvousPoint) -> None:
    """What one joiner sent is sent again: the gate asks something else each time."""
    gate = (point.rendezvous.host, point.rendezvous.port)
    heard: list[bytes] = []
    with socket.create_connection(gate, timeout=5) as first:
        asked, nonce = first.recv(32), secrets.token_bytes(32)
        heard.append(nonce + actors.cluster.tcp_proxy._proof(point.rendezvous.secret, b"rl_backend joiner", asked, nonce))
        first.sendall(heard[0])
        assert len(first.recv(32)) == 32
    with socket.create_connection(gate, timeout=5) as second:
        second.recv(32)
        second.sendall(heard[0])
        assert second.recv(32) == b""


def test_who_says_nothing_does_not_hold_up_the_others(point: RendezvousPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = (point.rendezvous.host, point.rendezvous.port)
    silent = [socket.create_connection(gate, timeout=5) for _ in range(20)]
    path = RendezvousRoute(point.rendezvous)
    assert store_at(path.port).add("count", 1) == 1
    for connection in silent:
        connection.close()


def test_a_gate_outlives_a_time_without_descriptors(point: RendezvousPoint) -> None:
    gate = (point.rendezvous.host, point.rendezvous.port)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Sockets of the joiners are there before the limit; only the gate needs more.
    joiners = [socket.socket() for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    filled = []
    try:
        with suppress(OSError):
            while True:
                filled.append(os.dup(0))
        for joiner in joiners:
            joiner.connect(gate)
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled:
            os.close(descriptor)
        for joiner in joiners:
            joiner.close()
    pass_gate(gate, point.rendezvous.secret).close()


@pytest.mark.parametrize("number", [errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS])
def test_a_connection_that_cannot_be_taken_is_not_the_gate_s_end(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()
    accept = socket.socket.accept

    def fails_once(listener: socket.socket) -> tuple[socket.socket, Any]:
        if not failed.is_set():
            failed.set()
            raise OSError(number, os.strerror(number))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_once)
    with socket.create_server((LOOPBACK, 0)) as inside:
        gate = Gate(ELSEWHERE, inside.getsockname()[:2], b"secret")
        pass_gate((ELSEWHERE, gate.port), b"secret").close()
        gate.close()
    assert failed.is_set()


def dribble(connection: socket.socket, stop: threading.Event) -> None:
    """Sends a byte at a time, each well before a limit on one byte."""
    with suppress(OSError):
        while not stop.wait(0.05):
            connection.sendall(b"x")


def test_who_speaks_slowly_is_turned_away_in_time(point: RendezvousPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.cluster.tcp_proxy, "HANDSHAKE_SECONDS", 0.5)
    stop = threading.Event()
    with socket.create_connection((point.rendezvous.host, point.rendezvous.port), timeout=5) as joiner:
        assert len(joiner.recv(32)) == 32
        talker = threading.Thread(target=dribble, args=(joiner, stop))
        talker.start()
        began = time.monotonic()
        with suppress(ConnectionResetError):
            assert joiner.recv(1) == b""
        took = time.monotonic() - began
        stop.set()
        talker.join()
    assert 0.3 < took < 2.5, "64 bytes at this pace take 3.2 s"


def test_a_gate_that_speaks_slowly_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.cluster.tcp_proxy, "HANDSHAKE_SECONDS", 0.5)
    stop = threading.Event()
    with socket.create_server((LOOPBACK, 0)) as impostor:
        talker = threading.Thread(target=lambda: dribble(impostor.accept()[0], stop))
        talker.start()
        began = time.monotonic()
        with pytest.raises(RLBackendError, match=r"turned this process away.*(timed out|did not come in 0\.5 s)"):
            pass_gate(impostor.getsockname()[:2], b"secret")
        assert time.monotonic() - began < 1.4, "32 bytes at this pace take 1.6 s"
        stop.set()
        talker.join()


def test_a_crowd_that_says_nothing_gives_up_its_places(point: RendezvousPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.cluster.tcp_proxy, "MOST_PENDING", 8)
    monkeypatch.setattr(actors.cluster.tcp_proxy, "PLACE_SECONDS", 0.2)
    gate = (point.rendezvous.host, point.rendezvous.port)
    before = threading.active_count()
    silent = [socket.create_connection(gate, timeout=5) for _ in range(40)]
    pass_gate(gate, point.rendezvous.secret).close()
    assert threading.active_count() - before <= 10
    for connection in silent:
        connection.close()


def test_a_crowd_with_the_secret_is_let_in_whole(point: RendezvousPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.cluster.tcp_proxy, "MOST_PENDING", 4)
    gate = (point.rendezvous.host, point.rendezvous.port)
    with ThreadPoolExecutor(32) as members:
        for connection in members.map(lambda _: pass_gate(gate, point.rendezvous.secret), range(64)):
            connection.close()


def test_a_gate_that_is_gone_is_an_error_that_says_so() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RLBackendError, match=rf"127\.0\.0\.1:{port} cannot be reached .* firewall"):
        TcpProxy(LOOPBACK, (LOOPBACK, port), b"secret")


def test_a_closed_gate_lets_nobody_in() -> None:
    gate = Gate(ELSEWHERE, (LOOPBACK, 1), b"secret")
    gate.close()
    with pytest.raises(RLBackendError, match="cannot be reached"):
        pass_gate((ELSEWHERE, gate.port), b"secret")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["10.0.0.1"], LOOPBACK),
        (["10.0.0.1", "10.0.0.1"], LOOPBACK),
        (["10.0.0.1", "10.0.0.1", "10.0.0.2"], "10.0.0.1"),
        (["10.0.0.2", "10.0.0.1"], "10.0.0.2"),
    ],
)
def test_processes_of_one_machine_meet_on_its_loopback_address(nodes: list[str], expected: str) -> None:
    assert rendezvous_address(nodes) == expected


def test_a_meeting_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(Rendezvous("10.0.0.1", 1, b"hidden"))


def test_a_connection_may_be_silent_for_longer_than_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.cluster.tcp_proxy, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server((LOOPBACK, 0)) as behind:
        gate = Gate(ELSEWHERE, behind.getsockname()[:2], b"secret")
        doorway = TcpProxy(LOOPBACK, (ELSEWHERE, gate.port), b"secret")
        behind.settimeout(5)
        behind.accept()[0].close()  # the doorway has tried the gate
        with socket.create_connection((LOOPBACK, doorway.port), timeout=5) as inside:
            outside, _ = behind.accept()
            with outside:
                outside.settimeout(5)
                time.sleep(0.4)
                inside.sendall(b"asked late")
                assert outside.recv(64) == b"asked late"
                time.sleep(0.4)
                outside.sendall(b"answered late")
                assert inside.recv(64) == b"answered late"
        doorway.close()
        gate.close()


def test_one_end_may_stop_speaking_and_still_hear_the_other() -> None:
    with socket.create_server((LOOPBACK, 0)) as behind:
        gate = Gate(ELSEWHERE, behind.getsockname()[:2], b"secret")
        behind.settimeout(5)
        inside = pass_gate((ELSEWHERE, gate.port), b"secret")
        inside.settimeout(5)
        outside, _ = behind.accept()
        with inside, outside:
            outside.settimeout(5)
            inside.sendall(b"the last word")
            inside.shutdown(socket.SHUT_WR)
            heard = b""
            while part := outside.recv(64):
                heard += part
            assert heard == b"the last word"
            outside.sendall(b"an answer")
            assert inside.recv(64) == b"an answer"
            outside.close()
            assert inside.recv(64) == b""
        gate.close()


def test_a_joiner_whose_target_is_gone_is_closed_and_its_place_is_free() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        target = gone.getsockname()[:2]
    gate = Gate(ELSEWHERE, target, b"secret")
    with pass_gate((ELSEWHERE, gate.port), b"secret") as joiner:
        joiner.settimeout(5)
        assert joiner.recv(1) == b""
    assert not gate._pending
    gate.close()


def test_a_gate_may_be_at_an_address_of_the_sixth_version() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no such addresses here")
    with socket.create_server((LOOPBACK, 0)) as behind:
        gate = Gate("::1", behind.getsockname()[:2], b"secret")
        with pass_gate(("::1", gate.port), b"secret"):
            behind.settimeout(5)
            behind.accept()[0].close()
        gate.close()


def test_what_follows_a_message_is_left_to_read() -> None:
    class InParts:
        """A connection on which messages come one by one."""

        def __init__(self, *messages: bytes) -> None:
            self.messages = list(messages)

        def settimeout(self, seconds: float) -> None:
            assert seconds > 0

        def recv(self, count: int) -> bytes:
            message = self.messages.pop(0)
            if len(message) > count:
                self.messages.insert(0, message[count:])
            return message[:count]

    connection: Any = InParts(b"a" * 10, b"b" * 30)
    assert _receive(connection, 32, time.monotonic() + 10) == b"a" * 10 + b"b" * 22
    assert connection.messages == [b"b" * 8]
