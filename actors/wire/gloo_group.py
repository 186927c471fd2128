"""A gloo process group of a training group's source rank and the engines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from actors.cluster.rendezvous import Rendezvous, RendezvousRoute, node_address
from rl_backend.contracts import TensorInfo
from rl_backend.parallel.groups import LOOPBACK
from rl_backend.weights.staging import read_tensor

TIMEOUT = timedelta(seconds=120)
"""How long one side waits for the other."""


@dataclass(frozen=True)
class Address:
    """Where a group meets, and how many processes are in it."""

    rendezvous: Rendezvous
    size: int


class GlooGroup:
    """A process group apart from torch's default one, so that a trainer's own groups are left alone.

    Joins the group that the source rank made, whose place in it is 0.
    """

    def __init__(self, address: Address, rank: int) -> None:
        self._path = RendezvousRoute(address.rendezvous)
        store = TCPStore(LOOPBACK, self._path.port, address.size, is_master=False, timeout=TIMEOUT)
        prefixed = PrefixStore("rl_backend_weights", store)
        self._group: Any = ProcessGroupGloo(prefixed, rank, address.size, _options(address.rendezvous))

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's contiguous CPU tensor to all."""
        if tensor.numel():
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()

    def close(self) -> None:
        """Closes the connections, which tells those who wait for this process."""
        self._group = None
        self._path.close()


def _options(rendezvous: Rendezvous) -> Any:
    """On the interface that ``GLOO_SOCKET_IFNAME`` names, else on the one with the rendezvous' kind of address."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    # Ranks of one machine have named the loopback interface for themselves; engines elsewhere cannot reach it.
    if interface and (rendezvous.on_one_machine or interface != "lo"):
        place = {"interface": interface}
    else:
        place = {"hostname": LOOPBACK if rendezvous.on_one_machine else node_address()}
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(**place)]
    options._timeout = TIMEOUT
    return options


def receive_into(group: GlooGroup, buffer: Tensor, layout: tuple[TensorInfo, ...]) -> None:
    """Receives every tensor at its place in a (N,) uint8 buffer."""
    for info in layout:
        group.broadcast(read_tensor(buffer, info))
