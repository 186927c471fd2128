"""The store where the ranks of a job meet."""

import errno
import ipaddress
import itertools
import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from rl_backend.contracts import ConfigError

LOOPBACK = "127.0.0.1"

_num_met = itertools.count()
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_store(timeout: timedelta) -> TCPStore:
    """A store that this process serves on a free port of the loopback address.

    torch's own rendezvous binds a store to all interfaces, where everyone who reaches the machine may read and write it.

    Args:
        timeout: how long ``get`` and ``wait`` of this process wait for a key.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The listening socket is handed over: its port is this store's from the moment that it is known.
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def store_environment(port: int) -> dict[str, str]:
    """Environment of a rank that meets the others at a store which is there already, on this machine's loopback address."""
    return {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def prefer_loopback(environment: MutableMapping[str, str]) -> None:
    """Has gloo and NCCL connect the ranks of one machine over its loopback interface, unless a variable names another."""
    for name in _INTERFACES:
        environment.setdefault(name, "lo")


def job_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Store, rank and number of ranks, from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    All ranks of a job call it equally often, before each default process group. With ``MASTER_ADDR`` a loopback address the
    job is on one machine: rank 0 serves the store on that address alone, unless an agent (torchrun) serves one, and gloo
    and NCCL are told to prefer the loopback interface.

    Raises:
        ConfigError: an incomplete environment, or a loopback address or port on which nothing can listen.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not; set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together (torchrun does), or none of them for one process",
            missing=missing,
        )
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and _is_loopback(os.environ["MASTER_ADDR"]):
        prefer_loopback(os.environ)
        if os.environ["RANK"] == "0":
            world_size = int(os.environ["WORLD_SIZE"])
            store: Store = _loopback_store(int(os.environ["MASTER_PORT"]), world_size, timeout)
            return PrefixStore(f"rl_backend_{next(_num_met)}", store), 0, world_size
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # A store may outlive a group: what the ranks left in it when they met before must not be taken for this time's.
    return PrefixStore(f"rl_backend_{next(_num_met)}", store), rank, world_size


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _loopback_store(port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """What torch's rendezvous gives rank 0, but on one address in the place of every interface."""
    host = LOOPBACK if os.environ["MASTER_ADDR"] == "localhost" else os.environ["MASTER_ADDR"]
    serve: dict[str, Any] = {}
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        serve["master_listen_fd"] = socket.create_server((host, port), family=family, backlog=2048).detach()
    except (OSError, OverflowError) as error:
        if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"MASTER_ADDR={host}, MASTER_PORT={port}: the store cannot listen there ({error}); set an address of this "
                "machine and a free port"
            ) from error
        # A store of this process may be there already; torch shares it, or says that the port is taken.
    return TCPStore(host, port, world_size, True, timeout=timeout, multi_tenant=True, **serve)
