"""The door to a group's store: who lacks the secret is turned away, and who has it passes."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import actors.gate
from actors.gate import Doorway, Gate, pass_gate
from actors.meeting import Meeting, MeetingPoint, PathToMeeting
from actors.network import meeting_address
from rl_backend.contracts import RLBackendError
from rl_backend.parallel.store import LOOPBACK

ELSEWHERE = "127.0.0.2"
"""Stands for a node's address: not the one on which stores listen."""
TIMEOUT = timedelta(seconds=5)


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    point = MeetingPoint(ELSEWHERE, TIMEOUT)
    yield point
    point.close()


def store_at(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)


@pytest.mark.shows("security: a process without a group's secret is turned away before it reads or writes the store")
def test_a_joiner_without_the_secret_is_turned_away(point: MeetingPoint) -> None:
    point.store.set("key", "value")
    gate = (point.meeting.host, point.meeting.port)
    for secret in (b"", secrets.token_bytes(32), point.meeting.secret[:-1]):
        with pytest.raises(RLBackendError, match=r"127\.0\.0\.2:\d+ turned this process away: it has another secret"):
            PathToMeeting(Meeting(*gate, secret))
    with pytest.raises(Exception, match=r".*"):
        TCPStore(ELSEWHERE, point.meeting.port, is_master=False, timeout=timedelta(seconds=2)).get("key")


def test_the_store_itself_cannot_be_reached_on_the_nodes_address(point: MeetingPoint) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ELSEWHERE, point.store.port), timeout=5)


def test_members_with_the_secret_share_the_store(point: MeetingPoint) -> None:
    path = PathToMeeting(point.meeting)
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


def test_a_proof_that_was_overheard_is_worth_nothing(point: MeetingPoint) -> None:
    """What one joiner sent is sent again: the gate asks something else each time."""
    gate = (point.meeting.host, point.meeting.port)
    heard: list[bytes] = []
    with socket.create_connection(gate, timeout=5) as first:
        asked, nonce = first.recv(32), secrets.token_bytes(32)
        heard.append(nonce + actors.gate._proof(point.meeting.secret, b"rl_backend joiner", asked, nonce))
        first.sendall(heard[0])
        assert len(first.recv(32)) == 32
    with socket.create_connection(gate, timeout=5) as second:
        second.recv(32)
        second.sendall(heard[0])
        assert second.recv(32) == b""


def test_who_says_nothing_does_not_hold_up_the_others(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = (point.meeting.host, point.meeting.port)
    silent = [socket.create_connection(gate, timeout=5) for _ in range(20)]
    path = PathToMeeting(point.meeting)
    assert store_at(path.port).add("count", 1) == 1
    for connection in silent:
        connection.close()


def test_a_gate_that_is_gone_is_an_error_that_says_so() -> None:
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RLBackendError, match=rf"127\.0\.0\.1:{port} cannot be reached .* firewall"):
        Doorway(LOOPBACK, (LOOPBACK, port), b"secret")


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
    assert meeting_address(nodes) == expected


def test_a_meeting_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(Meeting("10.0.0.1", 1, b"hidden"))
