"""Placement: the division of a cluster's cores and GPUs, and the reservations of a group."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.ray_watch import ray_is_usable
from rl_backend.contracts import ConfigError, UnsupportedError


def thread_environment() -> dict[str, str]:
    """Environment variables for a process before it starts; values that the driver's environment has are kept."""
    # Threads that wait sleep instead of spinning. A spinning thread holds the core that the one it waits for needs, where
    # another process works on the same cores, and a step then takes many times as long.
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def memory_environment() -> dict[str, str]:
    """The same for a process on CPUs that takes and frees gigabytes in each pass: it keeps them for the next."""
    # A page that the kernel gave, zeroed and took back costs more time than a product of matrices that fits in it, on some
    # virtual machines twice that of the whole pass. One arena: a pass in another thread takes the same memory again.
    if {"GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        return {}
    kept = ("mmap_max=0", "arena_max=1", f"trim_threshold={2**40}")
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{each}" for each in kept)}


type PlacementStrategy = Literal["pack", "spread"]


@dataclass(frozen=True)
class Slot:
    """Where one rank runs: a bundle of the placement group, and its place among the group's ranks on that node."""

    bundle: int
    node_id: str
    index_on_node: int


@dataclass(frozen=True)
class Reservation:
    """Reserved resources; ``slots[rank]`` is the rank's."""

    group: PlacementGroup
    slots: tuple[Slot, ...]

    def scheduling_strategy(self, rank: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.slots[rank].bundle, placement_group_capture_child_tasks=True
        )

    def remove(self) -> None:
        remove_placement_group(self.group)


class AskedRoom:
    """Room for more ranks of a group, which Ray reserves as soon as the cluster has it for all of them."""

    def __init__(
        self, num_ranks: int, *, cores_per_rank: int, gpus_per_rank: float, strategy: PlacementStrategy, name: str
    ) -> None:
        bundles = [_bundle(cores_per_rank, gpus_per_rank)] * num_ranks
        self._group = placement_group(bundles, strategy=strategy.upper(), name=name)

    @property
    def is_there(self) -> bool:
        return bool(placement_group_table(self._group)["state"] == "CREATED")

    def give_back(self) -> None:
        """Does nothing once Ray is shut down or lost, which did the same."""
        if ray_is_usable():
            remove_placement_group(self._group)


def _bundle(cores: int, gpus: float) -> dict[str, float]:
    return {"CPU": cores, **({"GPU": gpus} if gpus else {})}


def check_asked(num_ranks: int, cores_per_rank: int, gpus_per_rank: float) -> None:
    counts = {"num_ranks": num_ranks, "cores_per_rank": cores_per_rank}
    ConfigError.refuse_all((name, count, "must be at least 1") for name, count in counts.items() if count < 1)
    # Ray gives a share of one GPU only, so of shares above a half no two are on the same.
    if not 0 <= gpus_per_rank <= 1 or (0 < gpus_per_rank <= 0.5 and num_ranks > 1):
        problem = (
            "a rank trains on no GPU (0), on one (1) or on a share of one; several ranks take shares above 0.5, with which "
            "no two are on one GPU, as NCCL needs"
        )
        raise ConfigError.of("gpus_per_rank", gpus_per_rank, problem)


def reserve(
    *, num_ranks: int, cores_per_rank: int, gpus_per_rank: float, strategy: PlacementStrategy, name: str, timeout: float
) -> Reservation:
    """Reserves one bundle per rank; ranks on one node get consecutive numbers.

    Raises:
        ConfigError: Ray is not initialised, or numbers that make no sense.
        UnsupportedError: the cluster did not have the resources within ``timeout`` seconds.
    """
    if not ray.is_initialized():
        raise ConfigError("Ray is not initialised in this process; call ray.init(...) first")
    check_asked(num_ranks, cores_per_rank, gpus_per_rank)
    bundle = _bundle(cores_per_rank, gpus_per_rank)
    group = reserve_bundles(f"training group {name!r}", "rank", bundle, num_ranks, strategy, timeout, name=name)
    try:
        return Reservation(group, _slots(group, num_ranks))
    except BaseException:
        remove_placement_group(group)
        raise


def reserve_bundles(
    asker: str,
    member: str,
    bundle: dict[str, float],
    count: int,
    strategy: PlacementStrategy,
    timeout: float,
    *,
    name: str = "",
) -> PlacementGroup:
    """Reserves ``count`` equal bundles, one for each ``member`` of ``asker``; raises as :func:`reserve`."""
    group = placement_group([bundle] * count, strategy=strategy.upper(), name=name)
    try:
        if group.wait(timeout):
            return group
        free, total = ray.available_resources(), ray.cluster_resources()
        kinds = Counter(_amounts(node["Resources"]) for node in living_nodes())
        nodes = ", ".join(f"{count} node{'s' if count > 1 else ''} of {amounts}" for amounts, count in kinds.items())
        raise UnsupportedError(
            f"{asker} asks for {count} {member}s with {_amounts(bundle)} each, together "
            f"{_amounts({kind: count * amount for kind, amount in bundle.items()})}; after {timeout:g} s the cluster "
            f"has {_amounts(free)} free of {_amounts(total)}, in {nodes} (a {member} must fit into one node); "
            "free some, add nodes, or ask for less",
            asked={kind: count * amount for kind, amount in bundle.items()},
            free={kind: free.get(kind, 0.0) for kind in ("CPU", "GPU")},
            total={kind: total.get(kind, 0.0) for kind in ("CPU", "GPU")},
        )
    except BaseException:
        # Ctrl-C too: Ray would grant it one day, and nobody could give it back.
        remove_placement_group(group)
        raise


def living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _slots(group: PlacementGroup, num_ranks: int) -> tuple[Slot, ...]:
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first_bundle: dict[str, int] = {}
    for bundle in range(num_ranks):
        first_bundle.setdefault(nodes[bundle], bundle)
    slots: list[Slot] = []
    for bundle in sorted(range(num_ranks), key=lambda bundle: (first_bundle[nodes[bundle]], bundle)):
        on_node = sum(slot.node_id == nodes[bundle] for slot in slots)
        slots.append(Slot(bundle, nodes[bundle], on_node))
    return tuple(slots)


def _amounts(resources: Mapping[str, Any]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


# Of a GPU, the share of a rank that an engine has the rest of: above a half, so that Ray puts no two ranks on one GPU.
_BESIDE_AN_ENGINE = 0.6


class ClusterShare(NamedTuple):
    """The resources that each process of a run reserves; ``gpus`` are those of each training rank."""

    cores_per_rank: int
    cores_per_engine: int
    gpus: float

    @property
    def gpus_per_engine(self) -> float:
        """As many as a rank, or the rest of one that they share."""
        return 1 - self.gpus if 0 < self.gpus < 1 else self.gpus


def share_cluster(ranks: int, engines: int = 0, *, take_turns: bool = True, colocate: bool = False) -> ClusterShare:
    """Divides the cluster over training ranks and engines; raises :class:`ConfigError` where it has too few CPUs or GPUs.

    Args:
        take_turns: ranks and engines do not compute at the same time, so they may have the same cores.
        colocate: nor do they hold memory at the same time, so each engine shares the GPU of a rank.
    """
    gpus = gpus_each(ranks, engines, colocate=colocate)
    nodes = [node for node in living_nodes() if node["Resources"].get("CPU", 0) >= 1]
    # All CPUs are this machine's, and Ray counts enough of them, as in a session that was started here: ranks divide its
    # cores and so do engines, because they take turns.
    if len(nodes) == 1 and nodes[0]["NodeID"] == ray.get_runtime_context().get_node_id():
        members = (ranks, engines) if take_turns else (ranks + engines, ranks + engines)
        rank, engine = map(cores_each, members)
        if ranks * rank + engines * engine <= nodes[0]["Resources"]["CPU"]:
            return ClusterShare(rank, engine, gpus)
    # Else each has as many CPUs of its own as fit, all equally many.
    cpus = [int(node["Resources"]["CPU"]) for node in nodes]
    on_one = 2 if gpus < 1 else 1
    places = [int(node["Resources"].get("GPU", 0)) * on_one if gpus else ranks + engines for node in nodes]
    for cores in range(max(cpus, default=0), 0, -1):
        fit = sum(min(count // cores, most) for count, most in zip(cpus, places, strict=True))
        if fit >= ranks + engines:
            return ClusterShare(cores, cores, gpus)
    raise ConfigError(
        f"{ranks} ranks and {engines} engines take at least a CPU each, {ranks + engines} together; the cluster's nodes "
        f"have {cpus} CPUs{f' and GPUs for {places} of them' if gpus else ''}: ask for fewer, or add nodes"
    )


def gpus_each(ranks: int, engines: int, gpus: int | None = None, *, colocate: bool = False) -> float:
    """GPUs of each training rank: 0, 1, or the share of one that an engine has the rest of; raises where there are too
    few.
    """
    if gpus is None:
        gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus and colocate:
        # On a GPU without a rank Ray would put two engines.
        if engines <= ranks == gpus:
            return _BESIDE_AN_ENGINE
        raise ConfigError(
            f"{ranks} training ranks, of all groups, take a GPU each, and {engines} engines share those of as many ranks "
            f"(colocate); the cluster has {gpus}: ask for a rank for each GPU and no more engines than ranks, or hide GPUs"
        )
    if gpus == 0 or gpus >= ranks + engines:
        return min(gpus, 1)
    if gpus == ranks == engines == 1:
        return 0.5
    raise ConfigError(
        f"{ranks} training ranks, of all groups, and {engines} engines take a GPU each; the cluster has {gpus}: ask for "
        "fewer (one rank and one engine can share a GPU, N of each N GPUs with colocate), or add GPUs"
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_each(processes: int) -> int:
    """This machine's cores divided over processes that work at the same time."""
    return max(1, usable_cores() // max(1, processes))
