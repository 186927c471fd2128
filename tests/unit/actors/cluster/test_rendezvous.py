"""Rendezvous points, interfaces, ports and processes' causes, on this machine's loopback addresses."""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster import placement, rendezvous
from actors.cluster.placement import ClusterShare, gpus_each, reserve, share_cluster, thread_environment
from actors.cluster.rendezvous import (
    Rendezvous,
    RendezvousPoint,
    RendezvousRoute,
    interface_of,
    is_port_clash,
    rendezvous_address,
    use_interface,
    with_free_port,
)
from rl_backend.contracts import ConfigError, RLBackendError, UnsupportedError
from rl_backend.parallel.groups import LOOPBACK


@pytest.mark.parametrize(
    ("nodes", "address"),
    [(["a"], LOOPBACK), (["a", "a", "a"], LOOPBACK), (["a", "b"], "a"), (["a", "a", "b"], "a"), (["b", "a", "a"], "b")],
)
def test_processes_meet_at_the_first_node_unless_all_are_one(nodes: list[str], address: str) -> None:
    assert rendezvous_address(iter(nodes)) == address


def test_interfaces_are_found_by_their_address() -> None:
    assert interface_of(LOOPBACK) == "lo"
    assert interface_of("203.0.113.9") is None


@pytest.mark.parametrize(
    ("here", "address", "found", "interface", "prefers"),
    [
        (LOOPBACK, LOOPBACK, "eth7", "lo", True),
        ("10.0.0.1", LOOPBACK, "eth7", "lo", False),
        ("10.0.0.1", "10.0.0.2", "eth7", "eth7", False),
        ("10.0.0.1", "10.0.0.2", None, None, False),
    ],
)
def test_gloo_uses_the_interface_of_the_meeting_unless_one_is_named(
    here: str, address: str, found: str | None, interface: str | None, prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(rendezvous, "node_address", lambda: here)

    def interface_at(given: str) -> str | None:
        asked.append(given)
        return found

    monkeypatch.setattr(rendezvous, "interface_of", interface_at)
    monkeypatch.setattr(rendezvous, "prefer_loopback", lambda environment: asked.append(environment is os.environ))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    use_interface(address)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
    assert (True in asked) == prefers and (here in asked) == (address != LOOPBACK)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    use_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_on_one_machine_there_is_no_gate_and_no_doorway() -> None:
    point = RendezvousPoint(LOOPBACK, timedelta(seconds=5))
    assert point.rendezvous == Rendezvous(LOOPBACK, point.store.port) and point.rendezvous.secret == b""
    assert point.rendezvous.on_one_machine and not Rendezvous("10.0.0.1", 1).on_one_machine
    path = RendezvousRoute(point.rendezvous)
    assert path.port == point.store.port
    path.close()
    point.close()


def test_elsewhere_a_path_leads_through_the_gate_until_either_is_closed() -> None:
    point = RendezvousPoint("127.0.0.2", timedelta(seconds=5))
    assert point.rendezvous.host == "127.0.0.2" and point.rendezvous.port != point.store.port
    assert len(point.rendezvous.secret) == 32 and not point.rendezvous.on_one_machine
    other = RendezvousPoint("127.0.0.2", timedelta(seconds=5))
    assert other.rendezvous.secret != point.rendezvous.secret
    path = RendezvousRoute(point.rendezvous)
    assert path.port not in (point.rendezvous.port, point.store.port)
    with socket.create_connection((LOOPBACK, path.port), timeout=5):
        pass
    path.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((LOOPBACK, path.port), timeout=5)
    point.close()
    with pytest.raises(RLBackendError, match=rf"the rendezvous at 127\.0\.0\.2:{point.rendezvous.port} cannot be reached"):
        RendezvousRoute(point.rendezvous)
    other.close()


@pytest.mark.parametrize(
    ("error", "clash"),
    [
        (OSError(errno.EADDRINUSE, "x"), True),
        (OSError(errno.EACCES, "x"), False),
        (RuntimeError("failed: EADDRINUSE"), True),
        (RuntimeError("The server socket failed: Address Already In Use"), True),
        (ValueError("x"), False),
    ],
)
def test_a_clash_of_ports_is_known_in_whatever_it_has_caused(error: Exception, clash: bool) -> None:
    outer, middle = ValueError("outer"), KeyError("middle")
    outer.__cause__, middle.__cause__ = middle, error
    assert is_port_clash(error) is clash and is_port_clash(outer) is clash
    context = ValueError("outer")
    context.__context__ = error
    assert not is_port_clash(context)


def test_a_port_is_tried_as_often_as_is_asked_for() -> None:
    tried: list[int] = []

    def attempt(port: int) -> str:
        tried.append(port)
        if len(tried) < 3:
            raise OSError(errno.EADDRINUSE, "x")
        return f"at {port}"

    assert with_free_port(LOOPBACK, attempt, attempts=3) == f"at {tried[2]}"
    tried.clear()
    with pytest.raises(OSError, match="x"):
        with_free_port(LOOPBACK, attempt, attempts=2)
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0: must be at least 1"),
        ({"cores_per_rank": 0}, "cores_per_rank=0: must be at least 1"),
        ({"gpus_per_rank": -0.5}, "gpus_per_rank=-0.5: a rank trains on no GPU"),
        ({"gpus_per_rank": 1.5}, "gpus_per_rank=1.5: a rank trains on no GPU"),
        ({"gpus_per_rank": 0.5, "num_ranks": 2}, "gpus_per_rank=0.5: .*several ranks take shares above 0.5"),
    ],
)
def test_a_reservation_that_makes_no_sense_is_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = {"num_ranks": 1, "cores_per_rank": 1, "gpus_per_rank": 0, "strategy": "pack", "name": "x", "timeout": 1.0}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: pytest.fail("it is reserved"))
    with pytest.raises(ConfigError, match=f"^{message}"):
        reserve(**{**given, **options})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"Ray is not initialised in this process; call ray.init"):
        reserve(**given)


def test_what_could_not_be_reserved_is_told_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    living = ((True, 4), (True, 4), (False, 8), (True, 2))
    nodes = [{"Alive": alive, "Resources": {"CPU": cpus, "GPU": 1}} for alive, cpus in living]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.5})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 10.0, "GPU": 3.0, "memory": 7.0})
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: SimpleNamespace(wait=lambda timeout: False))
    monkeypatch.setattr(placement, "remove_placement_group", lambda group: None)
    with pytest.raises(UnsupportedError) as refused:
        placement.reserve_bundles("training group 'x'", "rank", {"CPU": 2, "GPU": 0.5}, 3, "pack", 7.5)
    assert str(refused.value) == (
        "training group 'x' asks for 3 ranks with 2 CPU and 0.5 GPU each, together 6 CPU and 1.5 GPU; after 7.5 s "
        "the cluster has 1.5 CPU and 0 GPU free of 10 CPU and 3 GPU, in 2 nodes of 4 CPU and 1 GPU, 1 node of 2 CPU and "
        "1 GPU (a rank must fit into one node); free some, add nodes, or ask for less"
    )
    assert refused.value.details == {
        "asked": {"CPU": 6, "GPU": 1.5}, "free": {"CPU": 1.5, "GPU": 0.0}, "total": {"CPU": 10.0, "GPU": 3.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus", "each"),
    [(2, 1, 0, 0), (1, 1, 1, 0.5), (1, 0, 1, 1), (2, 1, 3, 1), (2, 1, 8, 1), (1, 1, 2, 1)],
)
def test_gpus_of_each_process(ranks: int, engines: int, gpus: int, each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_each(ranks, engines, gpus) == each
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)} if gpus else {})
    assert gpus_each(ranks, engines) == each


@pytest.mark.parametrize(("ranks", "engines", "gpus"), [(2, 0, 1), (1, 2, 2), (2, 1, 2), (2, 1, 1)])
def test_too_few_gpus_are_refused(ranks: int, engines: int, gpus: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^{ranks} training ranks, of all groups, and {engines} engines .* has {gpus}: ask"
    ):
        gpus_each(ranks, engines, gpus)


@pytest.mark.parametrize(
    ("ranks", "engines", "gpus", "each"), [(4, 4, 4, 0.6), (8, 2, 8, 0.6), (1, 1, 1, 0.6), (3, 3, 0, 0)]
)
def test_ranks_and_engines_with_memory_in_turn_share_gpus(ranks: int, engines: int, gpus: int, each: float) -> None:
    assert gpus_each(ranks, engines, gpus, colocate=True) == each
    assert ClusterShare(1, 1, each).gpus_per_engine == (0.4 if gpus else 0)


@pytest.mark.parametrize(("ranks", "engines", "gpus"), [(4, 4, 3), (2, 3, 2), (2, 2, 4)])
def test_gpus_without_a_rank_and_engines_without_one_are_refused(ranks: int, engines: int, gpus: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^{ranks} training ranks.* {engines} engines share .* the cluster has {gpus}: ask"
    ):
        gpus_each(ranks, engines, gpus, colocate=True)


def test_cores_of_several_nodes_are_as_many_as_fit_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def node(cpus: float, gpus: int = 0) -> dict[str, Any]:
        return {"Alive": True, "NodeID": f"{cpus}", "Resources": {"CPU": cpus, "GPU": gpus}}

    nodes: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: "of the driver")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": sum(each["Resources"]["GPU"] for each in nodes)})
    for given, ranks, engines, cores in (
        ([node(7), node(3)], 2, 1, 3),
        ([node(7), node(3)], 3, 1, 2),
        ([node(0.5), node(5.9)], 2, 0, 2),
        ([node(8, 1), node(4, 1)], 1, 1, 4),
        ([node(8, 2), node(4, 1)], 2, 1, 4),
    ):
        nodes[:] = given
        found = share_cluster(ranks, engines)
        assert (found.cores_per_rank, found.cores_per_engine) == (cores, cores)
    nodes[:] = [node(16, 4), node(8, 4)]
    assert share_cluster(8, 4, colocate=True) == ClusterShare(2, 2, 0.6)
    assert share_cluster(8, 8, colocate=True) == ClusterShare(1, 1, 0.6), "two processes on each GPU"
    nodes[:] = [node(2), node(1)]
    with pytest.raises(
        ConfigError, match=r"^3 ranks and 1 engines .*, 4 together; the cluster's nodes have \[2, 1\] CPUs: ask"
    ):
        share_cluster(3, 1)
    nodes[:] = [node(9, 1), node(1, 0)]
    with pytest.raises(ConfigError, match="has 1: ask for fewer"):
        share_cluster(2, 0)


def test_threads_wait_asleep_unless_the_driver_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert thread_environment() == {"OMP_WAIT_POLICY": "PASSIVE"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert thread_environment() == {"OMP_WAIT_POLICY": "ACTIVE"}
