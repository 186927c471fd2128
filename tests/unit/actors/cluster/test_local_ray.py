"""Joining a Ray that another process of this machine started."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
import ray
from ray._private import ray_constants

from actors.cluster.local_ray import join_ray


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        TimeoutError("timed out"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
    ],
)
def test_a_ray_is_of_this_machine_alone_where_its_port_does_not_answer_at_the_address_in_the_network(
    monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    connect, joined = socket.create_connection, list[tuple[Any, Any]]()

    def only_on_loopback(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] != "127.0.0.1":
            raise error
        return connect(address, timeout)

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.7")
    monkeypatch.setattr(socket, "create_connection", only_on_loopback)
    monkeypatch.setattr(ray, "init", lambda **given: joined.append((given["address"], ray_constants.ENABLE_RAY_CLUSTER)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        join_ray(address)
    join_ray(address)

    assert joined == [(address, False), (address, True)]
    assert ray_constants.ENABLE_RAY_CLUSTER is True
