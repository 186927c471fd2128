"""Network addresses of this process's node, and which interface its process groups use."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable

import ray

from rl_backend.parallel.store import LOOPBACK, prefer_loopback

_SIOCGIFADDR = 0x8915


def node_address() -> str:
    """This node's address, as Ray has it."""
    return str(ray.util.get_node_ip_address())


def meeting_address(nodes: Iterable[str]) -> str:
    """Where processes on nodes of these addresses meet, the first being this one: loopback where all are one machine's."""
    first, *others = nodes
    return LOOPBACK if all(other == first for other in others) else first


def use_interface(address: str) -> None:
    """Has gloo use the interface with this address of a meeting, unless ``GLOO_SOCKET_IFNAME`` names one.

    Left to itself gloo takes the address of the host's name, which may be either. NCCL is left to itself, for it has one
    interface per process and weights may travel to other nodes, unless Ray itself is on the loopback address alone.
    """
    here = node_address()
    if here == LOOPBACK:
        prefer_loopback(os.environ)
    interface = "lo" if address == LOOPBACK else interface_of(here)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address; None when no interface has it as its first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
