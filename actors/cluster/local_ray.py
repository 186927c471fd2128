"""Ray for one machine, out of reach of others, with process groups of its own.

Ray starts its processes in the group of the driver. A terminal, ``timeout`` and some schedulers send a signal to the whole
group of a command. Ray's servers block Ctrl-C but end on SIGTERM, and with them the step that a run would still finish.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import ray
from ray._private import ray_constants, services


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Inside, each process that Ray starts gets a group of its own, and passes it on to those that it starts.

    They stay in the driver's session, and still end when the driver ends: the kernel sees to that, not the group.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def init_local_ray(**options: Any) -> None:
    """``ray.init(address="local", **options)``, where Ray and its processes listen only on the loopback address.

    By itself Ray binds to all interfaces of the machine, and its metrics can be read there without a token. What is sent to
    the driver's process group does not reach Ray: see :mod:`actors.cluster.local_ray`.
    """
    with _one_machine(), own_process_groups():
        ray.init(address="local", **options)


def join_ray(address: str, **options: Any) -> None:
    """``ray.init(address=address, **options)``, even if :func:`init_local_ray` of another process started that Ray.

    Ray takes a loopback address for this machine's address in the network, where such a Ray does not answer.
    """
    with _one_machine() if _on_loopback_alone(address) else nullcontext():
        ray.init(address=address, **options)


def _on_loopback_alone(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdigit():
        return False
    return _answers(host, int(port)) and not _answers(ray.util.get_node_ip_address(), int(port))


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def _one_machine() -> Iterator[None]:
    # Ray's own switch, which it sets on macOS and Windows. RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 sets it too, but before
    # Ray is imported alone, and to a node address of 127.0.0.1 Ray prefers the machine's.
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
