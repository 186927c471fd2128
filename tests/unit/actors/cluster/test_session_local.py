"""A Ray of this machine alone: joined from another process, and out of reach of signals to the driver's process group."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import nullcontext
from typing import Any

import pytest
import ray
from ray._private import ray_constants, services

from actors.cluster.session import join_ray, own_process_groups


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


@pytest.mark.parametrize("own", [False, True])
def test_processes_of_ray_are_in_the_drivers_group_or_their_own(own: bool) -> None:
    """Where the first case fails, Ray has come to see to it itself, and ``own_process_groups`` can go."""
    before = services.ConsolePopen
    with own_process_groups() if own else nullcontext():
        process = services.start_ray_process(["sleep", "600"], "log_monitor", fate_share=True).process
    try:
        assert (os.getpgid(process.pid) == os.getpgrp()) is not own
        assert os.getsid(process.pid) == os.getsid(0)
        assert services.ConsolePopen is before
    finally:
        process.kill()
        process.wait()
