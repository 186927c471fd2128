"""Ports that stay free until they are opened, and others in place of those that another program took."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from actors.cluster.rendezvous import ATTEMPTS, is_port_clash, with_free_port

HOST = "127.0.0.1"
SECOND = timedelta(seconds=5)


@contextmanager
def taken(port: int) -> Iterator[int]:
    """Another program that listens there."""
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind((HOST, port))
        thief.listen()
        yield port


def listen(port: int) -> TCPStore:
    # As vLLM opens the store of an NCCL group.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen()
        return TCPStore(HOST, port, None, True, SECOND, wait_for_workers=False, master_listen_fd=listener.detach())


def test_a_port_that_another_program_takes_is_replaced_by_another() -> None:
    tried: list[int] = []

    def attempt(port: int) -> TCPStore:
        tried.append(port)
        if len(tried) <= 2:
            with taken(port):
                return listen(port)
        return listen(port)

    store = with_free_port(HOST, attempt)
    assert store.port == tried[-1]
    assert len(set(tried)) == 3


def test_a_clash_of_a_store_that_opens_its_port_itself_is_known_as_one() -> None:
    with with_free_port(HOST, taken) as port, pytest.raises(RuntimeError) as error:
        TCPStore(HOST, port, None, True, SECOND, wait_for_workers=False)
    assert is_port_clash(error.value)
    assert not is_port_clash(ValueError("no"))


@pytest.mark.parametrize(("error", "calls"), [(OSError(98, "Address already in use"), ATTEMPTS), (ValueError("other"), 1)])
def test_an_attempt_ends_with_its_own_error(error: Exception, calls: int) -> None:
    tried: list[int] = []

    def attempt(port: int) -> None:
        tried.append(port)
        raise error

    with pytest.raises(type(error)) as raised:
        with_free_port(HOST, attempt)
    assert raised.value is error
    assert len(tried) == calls


def test_a_port_stays_bound_until_it_is_opened() -> None:
    def attempt(port: int) -> None:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))

    with_free_port(HOST, attempt)
