"""The store where the ranks of a job meet."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import MutableMapping
from datetime import timedelta

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

    All ranks of a job call it equally often, before each default process group.

    Raises:
        ConfigError: an incomplete environment.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not; set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT together (torchrun does), or none of them for one process",
            missing=missing,
        )
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    # A store may outlive a group: what the ranks left in it when they met before must not be taken for this time's.
    return PrefixStore(f"rl_backend_{next(_num_met)}", store), rank, world_size
