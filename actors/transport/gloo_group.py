"""A gloo process group of a training group's source rank and the engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from rl_backend.contracts import TensorInfo
from rl_backend.weights import read_tensor

TIMEOUT = timedelta(seconds=120)
"""How long one side waits for the other."""


@dataclass(frozen=True)
class Address:
    """Where a group meets, and how many processes are in it."""

    host: str
    port: int
    size: int


class GlooGroup:
    """A process group apart from torch's default one, so that a trainer's own groups are left alone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._group: Any = ProcessGroupGloo(PrefixStore("rl_backend_weights", store), rank, size, _options())

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's contiguous CPU tensor to all."""
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        """Closes the connections, which tells those who wait for this process."""
        self._group = None


def _options() -> Any:
    """On the interface that ``GLOO_SOCKET_IFNAME`` names, else on the one with this node's Ray address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    place = {"interface": interface} if interface else {"hostname": ray.util.get_node_ip_address()}
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(**place)]
    options._timeout = TIMEOUT
    return options


def join(address: Address, rank: int) -> GlooGroup:
    """Joins the group that the source rank made."""
    store = TCPStore(address.host, address.port, address.size, is_master=False, timeout=TIMEOUT)
    return GlooGroup(store, rank, address.size)


def receive_into(group: GlooGroup, buffer: Tensor, layout: tuple[TensorInfo, ...]) -> None:
    """Receives every tensor at its place in a (N,) uint8 buffer."""
    for info in layout:
        group.broadcast(read_tensor(buffer, info))
