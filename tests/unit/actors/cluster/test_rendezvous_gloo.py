"""The group over which weights go to engines of other hosts, without a network."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.cluster import rendezvous as module
from actors.cluster.rendezvous import GlooAddress, GlooGroup, Rendezvous
from rl_backend.contracts import TensorInfo
from rl_backend.weights.staging import read_tensor

HERE, ELSEWHERE = Rendezvous("127.0.0.1", 5), Rendezvous("10.0.0.1", 6, b"secret")


class Gloo:
    """A process group that gives every tensor the next of its bytes."""

    class _Options:
        pass

    made: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        type(self).made = arguments
        self.next = 0
        self.options: list[Any] = []

    @staticmethod
    def create_device(**place: str) -> dict[str, str]:
        return place

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1
        tensor.copy_(torch.arange(self.next, self.next + tensor.numel()))
        self.next += tensor.numel()
        self.options.append((options.rootRank, options.rootTensor))
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[Rendezvous]:
    """Ways to a rendezvous that were closed."""
    ended: list[Rendezvous] = []
    monkeypatch.setattr(
        module,
        "RendezvousRoute",
        lambda rendezvous: SimpleNamespace(port=rendezvous.port + 1, close=lambda: ended.append(rendezvous)),
    )
    monkeypatch.setattr(module, "TCPStore", lambda *arguments, **named: (arguments, named))
    monkeypatch.setattr(module, "PrefixStore", lambda prefix, store: (prefix, store))
    monkeypatch.setattr(module, "ProcessGroupGloo", Gloo)
    monkeypatch.setattr(module, "node_address", lambda: "10.0.0.7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return ended


def test_a_member_joins_the_store_of_the_source(closed: list[Rendezvous]) -> None:
    group = GlooGroup(GlooAddress(ELSEWHERE, 3, 77.5), 2)
    (prefix, (place, named)), rank, size, options = Gloo.made
    assert prefix == "rl_backend_weights" and place == ("127.0.0.1", 7, 3)
    assert named == {"is_master": False, "timeout": timedelta(seconds=77.5)} and (rank, size) == (2, 3)
    assert options._timeout == timedelta(seconds=77.5) and not closed
    group.close()
    assert closed == [ELSEWHERE]


@pytest.mark.parametrize(
    ("rendezvous", "interface", "expected"),
    [
        (HERE, None, {"hostname": "127.0.0.1"}),
        (ELSEWHERE, None, {"hostname": "10.0.0.7"}),
        (ELSEWHERE, "", {"hostname": "10.0.0.7"}),
        (HERE, "lo", {"interface": "lo"}),
        (HERE, "eth0", {"interface": "eth0"}),
        (ELSEWHERE, "eth0", {"interface": "eth0"}),
        (ELSEWHERE, "lo", {"hostname": "10.0.0.7"}),
    ],
)
def test_a_group_is_where_all_members_can_reach_it(
    rendezvous: Rendezvous,
    interface: str | None,
    expected: dict[str, str],
    closed: list[Rendezvous],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    GlooGroup(GlooAddress(rendezvous, 2, 9.0), 1)
    assert Gloo.made[3]._devices == [expected]


def test_tensors_are_received_at_their_places(closed: list[Rendezvous]) -> None:
    infos: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("a", (2, 3), torch.uint8),
        ("none", (0, 4), torch.float32),
        ("b", (), torch.uint8),
        ("c", (2,), torch.int16),
    ]
    layout, offset = [], 0
    for name, shape, dtype in infos:
        size = torch.empty(shape, dtype=dtype).nbytes
        offset += -offset % 8
        layout.append(TensorInfo.of(name, shape, dtype).replace(offset=offset))
        offset += size
    buffer = torch.full((offset,), 255, dtype=torch.uint8)
    group = GlooGroup(GlooAddress(HERE, 2, 9.0), 1)
    for info in layout:
        group.broadcast(read_tensor(buffer, info))
    received: Any = group._group
    assert received.options == [(0, 0)] * 3, "an empty tensor has nothing to wait for"
    found = {info.name: read_tensor(buffer, info).flatten().view(torch.uint8).tolist() for info in layout}
    assert found == {"a": [0, 1, 2, 3, 4, 5], "none": [], "b": [6], "c": [7, 8, 9, 10]}
