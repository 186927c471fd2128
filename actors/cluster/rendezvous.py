"""Rendezvous of processes: a store on the loopback address, a gate for other machines, free ports, a push's gloo group."""

import errno
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from actors.cluster.tcp_proxy import Gate, TcpProxy
from rl_backend.parallel.groups import LOOPBACK, host_store, prefer_loopback

# Ports that with_free_port() tries.
ATTEMPTS = 5


def with_free_port[T](host: str, attempt: Callable[[int], T], *, attempts: int = ATTEMPTS) -> T:
    """``attempt(port)`` with a port that is free at ``host``, for what must open the port itself, and sets
    ``SO_REUSEADDR`` as torch and vLLM do.

    Raises:
        OSError: ``host`` is not an address of this machine.
        Exception: what ``attempt`` raises, when it is no clash of ports or the last of ``attempts``.
    """
    while True:
        # Bound meanwhile, which keeps the port from every program that does not set SO_REUSEADDR.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
            try:
                return attempt(int(holder.getsockname()[1]))
            except Exception as error:  # torch and vLLM report a clash in types of their own
                attempts -= 1
                if attempts <= 0 or not is_port_clash(error):
                    raise


def is_port_clash(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EADDRINUSE:
            return True
        # torch's DistNetworkError and errors that crossed a process keep no number, only the text.
        if "EADDRINUSE" in str(seen) or os.strerror(errno.EADDRINUSE).lower() in str(seen).lower():
            return True
        seen = seen.__cause__
    return False


_SIOCGIFADDR = 0x8915


def node_address() -> str:
    return str(ray.util.get_node_ip_address())


def rendezvous_address(nodes: Iterable[str]) -> str:
    """The address where processes on these nodes meet, this node first: loopback if all are one machine."""
    first, *others = nodes
    return LOOPBACK if all(other == first for other in others) else first


def use_interface(address: str) -> None:
    """Makes gloo use the interface with a rendezvous' address, unless ``GLOO_SOCKET_IFNAME`` names one."""
    # Left to itself gloo takes the address of the host's name, which may be either. NCCL is left to itself, for it has one
    # interface per process and weights may travel to other nodes, unless Ray itself is on the loopback address alone.
    here = node_address()
    if here == LOOPBACK:
        prefer_loopback(os.environ)
    interface = "lo" if address == LOOPBACK else interface_of(here)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def interface_of(address: str) -> str | None:
    """Name of the interface with this IPv4 address; None if it is no interface's first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@dataclass(frozen=True)
class Rendezvous:
    """The way to a :class:`RendezvousPoint`. Travels only over Ray, because whoever has it is let in.

    Attributes:
        host: the loopback address where all members are on one machine, else the host's node's.
        secret: that the gate asks for; empty without a gate.
    """

    host: str
    port: int
    secret: bytes = field(default=b"", repr=False)

    @property
    def on_one_machine(self) -> bool:
        return self.host == LOOPBACK


class RendezvousPoint:
    """A store of this process, for members that have its :attr:`rendezvous`; it waits ``timeout`` for a key."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        self.store: TCPStore = host_store(timeout)
        self._gate: Gate | None = None
        self.rendezvous = Rendezvous(LOOPBACK, self.store.port)
        if address != LOOPBACK:
            secret = secrets.token_bytes(32)
            self._gate = Gate(address, (LOOPBACK, self.store.port), secret)
            self.rendezvous = Rendezvous(address, self._gate.port, secret)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()


class RendezvousRoute:
    """This process's way to a rendezvous: the store answers at ``port`` of the loopback address. Raises as
    :func:`pass_gate`.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._doorway = (
            None if rendezvous.on_one_machine else TcpProxy(LOOPBACK, (rendezvous.host, rendezvous.port), rendezvous.secret)
        )
        self.port = rendezvous.port if self._doorway is None else self._doorway.port

    def close(self) -> None:
        """Opens no more connections; those that are open stay."""
        if self._doorway is not None:
            self._doorway.close()


@dataclass(frozen=True)
class GlooAddress:
    """``timeout``: seconds that one side waits for the other."""

    rendezvous: Rendezvous
    size: int
    timeout: float

    @property
    def limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)


class GlooGroup:
    """A process group of a training rank that sends, whose place is 0 and whose store all join, and the engines."""

    def __init__(self, address: GlooAddress, rank: int) -> None:
        self._path = RendezvousRoute(address.rendezvous)
        store = TCPStore(LOOPBACK, self._path.port, address.size, is_master=False, timeout=address.limit)
        # Apart from torch's default group, so that a trainer's own groups are left alone.
        prefixed = PrefixStore("rl_backend_weights", store)
        self._group: Any = ProcessGroupGloo(prefixed, rank, address.size, _gloo_options(address))

    def broadcast(self, tensor: Tensor) -> None:
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        """Closes the connections, which tells those who wait for this process."""
        self._group = None
        self._path.close()


def _gloo_options(address: GlooAddress) -> Any:
    rendezvous = address.rendezvous
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    # Ranks of one machine have named the loopback interface for themselves; engines elsewhere cannot reach it.
    if interface and (rendezvous.on_one_machine or interface != "lo"):
        place = {"interface": interface}
    else:
        place = {"hostname": LOOPBACK if rendezvous.on_one_machine else node_address()}
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(**place)]
    options._timeout = address.limit
    return options
