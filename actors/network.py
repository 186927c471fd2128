"""The network interface that other nodes reach."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import ray

_SIOCGIFADDR = 0x8915


def use_node_interface() -> None:
    """Has gloo use the interface of this node's Ray address, unless ``GLOO_SOCKET_IFNAME`` names one.

    Left to itself gloo takes the address of the host's name, which is often the loopback address.
    """
    interface = interface_of(ray.util.get_node_ip_address())
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
