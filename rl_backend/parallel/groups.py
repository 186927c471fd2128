"""Process groups and the device mesh of one rank."""

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rl_backend.contracts import ConfigError, ParallelConfig
from rl_backend.parallel.store import job_store

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, when the groups are made and in every collective.

Longer than what one rank may do while the others wait: to write a Hugging Face directory to a slow disk, say.
"""


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """This rank's device and its place in the layout, whichever runtime made the groups.

    Attributes:
        parallel: the layout.
        device: what this rank trains on.
        dp_rank, dp_size: place among the ranks that see different data.
        dp_group: ranks that differ in it only.
        replica_group: the ranks that hold parts of one model, and so see the same data.
        world_group: all ranks, for collectives on ``device``.
        host_group: all ranks over gloo, for collectives on the CPU from any one thread at a time; never used by forward,
            backward or the optimizer.
    """

    parallel: ParallelConfig
    device: torch.device
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    host_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.world_group.size()


@dataclass(frozen=True, kw_only=True)
class ParallelGroups(RankGroups):
    """Ranks are numbered pp first, then dp, cp, and tp fastest.

    Attributes:
        mesh: the ranks of this pipeline rank: dp and cp together, over which parameters are sharded, by tp.
        fsdp_mesh, tp_mesh: its dimensions.
        expert_mesh: the same ranks as expert-data-parallel ranks by ep by etp, for the parameters of experts.
        edp_mesh: its first dimension.
        ep_mesh: its second and, where experts are cut over etp, its third.
        pp_group, cp_group, tp_group: ranks that differ in one dimension only, for collectives on ``device``.
        token_group: the ranks that share the tokens of a micro-batch in one layer, over cp and tp.
        expert_group: the ranks that together hold every expert once, over ep and etp.
        made: the groups that :func:`close_groups` destroys.
    """

    mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    tp_mesh: DeviceMesh
    expert_mesh: DeviceMesh
    edp_mesh: DeviceMesh
    ep_mesh: DeviceMesh
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    token_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    made: tuple[dist.ProcessGroup, ...]

    @property
    def pipeline(self) -> int:
        """Which of the pipelines beside each other this rank is in."""
        return self.world_group.rank() % (self.world_size // self.parallel.pp)


_num_opened = itertools.count()


@dataclass
class _DefaultGroup:
    """The default process group, if this module made it, and how many users it has."""

    made_here: bool = False
    users: int = 0


_default_group = _DefaultGroup()


def training_device(name: str) -> torch.device:
    """The device of this rank for ``auto``, ``cpu`` or ``cuda``; CUDA devices are numbered by ``LOCAL_RANK`` (0 without it).

    Raises:
        ConfigError: CUDA is asked for and missing, or ``LOCAL_RANK`` has no device.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError.of("device", name, "PyTorch sees no CUDA device; use 'auto' or 'cpu'")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError.of("LOCAL_RANK", index, f"this process sees {count} CUDA devices, so it must be below {count}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def open_groups(parallel: ParallelConfig, device: torch.device) -> ParallelGroups:
    """Makes the groups of the layout. A collective over all ranks of the job.

    Uses the default process group, or first makes it: from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``
    when ``WORLD_SIZE`` is set, else of this process alone. :func:`close_groups` undoes it.

    Raises:
        ConfigError: the world size does not fit ``parallel``, an incomplete environment, or a default group that cannot
            communicate on ``device``.
    """
    join_default_group(device)
    try:
        return _open(parallel, device)
    except BaseException:
        leave_default_group()
        raise


def close_groups(groups: ParallelGroups) -> None:
    """Destroys what :func:`open_groups` made; the default group only after its last user, and only if made there."""
    if dist.is_initialized():
        for group in groups.made:
            dist.destroy_process_group(group)
        for mesh in (groups.mesh, groups.expert_mesh):
            # DTensor's caches may keep a mesh forever. The mesh would keep its groups, and each gloo group three threads.
            mesh._pg_registry.clear()
        leave_default_group()


def _open(parallel: ParallelConfig, device: torch.device) -> ParallelGroups:
    world_size = dist.get_world_size()
    dp_size = parallel.data_parallel_size(world_size)
    ranks = torch.arange(world_size)
    dense = ranks.view(parallel.pp, dp_size, parallel.cp, parallel.tp)
    experts = ranks.view(parallel.pp, -1, parallel.ep, parallel.etp)
    by_partition: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(grid: Tensor, *dimensions: int) -> dist.ProcessGroup:
        """This rank's group of ranks that differ in ``dimensions`` of ``grid`` only, in the order of their numbers.

        Each partition of the ranks is made once. A collective over all ranks.
        """
        last = tuple(range(-len(dimensions), 0))
        rows = grid.movedim(dimensions, last).flatten(-len(dimensions)).flatten(0, -2)
        partition = tuple(tuple(row) for row in rows.tolist())
        if len(partition) == 1:
            return world_group()
        if partition not in by_partition:
            mine, _ = dist.new_subgroups_by_enumeration([list(row) for row in partition], timeout=COLLECTIVE_TIMEOUT)
            assert mine is not None, "every rank is in one row"
            by_partition[partition] = mine
        return by_partition[partition]

    pp_group, dp_group, cp_group, tp_group = (along(dense, dimension) for dimension in range(4))
    pp_rank = pp_group.rank()
    # DTensor's caches take meshes of equal names and ranks for one mesh, even after the groups of one are gone.
    unique = next(_num_opened)
    fsdp, tp, edp, ep, etp = (f"{name}_{unique}" for name in ("fsdp", "tp", "edp", "ep", "etp"))
    mesh = DeviceMesh.from_group(
        [along(dense, 1, 2), tp_group], device.type, dense[pp_rank].flatten(0, 1), mesh_dim_names=(fsdp, tp)
    )
    expert_mesh = DeviceMesh.from_group(
        [along(experts, dimension) for dimension in range(1, 4)],
        device.type,
        experts[pp_rank],
        mesh_dim_names=(edp, ep, etp),
    )
    backend = "fake" if _is_fake() else "gloo"
    host_group = dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)
    return ParallelGroups(
        parallel=parallel,
        device=device,
        mesh=mesh,
        fsdp_mesh=mesh[fsdp],
        tp_mesh=mesh[tp],
        expert_mesh=expert_mesh,
        edp_mesh=expert_mesh[edp],
        ep_mesh=expert_mesh[ep, etp] if parallel.etp > 1 else expert_mesh[ep],
        dp_rank=dp_group.rank(),
        dp_size=dp_size,
        pp_group=pp_group,
        dp_group=dp_group,
        cp_group=cp_group,
        tp_group=tp_group,
        token_group=along(dense, 2, 3),
        replica_group=along(dense, 0, 2, 3),
        expert_group=along(experts, 2, 3),
        world_group=world_group(),
        host_group=host_group,
        made=(host_group, *by_partition.values()),
    )


def world_group() -> dist.ProcessGroup:
    """The default process group, which there is."""
    world = dist.group.WORLD
    assert world is not None, "joined before"
    return world


def join_default_group(device: torch.device) -> None:
    """Makes the default process group if there is none, and counts its users; :func:`leave_default_group` undoes it.

    Raises:
        ConfigError: an incomplete environment, or a default group that cannot communicate on ``device``.
    """
    if not dist.is_initialized():
        on_cuda = device.type == "cuda"
        alone = "WORLD_SIZE" not in os.environ
        store, rank, world_size = (dist.HashStore(), 0, 1) if alone else job_store(COLLECTIVE_TIMEOUT)  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if on_cuda else None,
        )
        _default_group.made_here = True
        _default_group.users = 0
    _require_backend(device)
    _default_group.users += 1


def leave_default_group() -> None:
    """Destroys the default process group after its last user, if :func:`join_default_group` made it."""
    _default_group.users -= 1
    if _default_group.made_here and _default_group.users == 0:
        _default_group.made_here = False
        dist.destroy_process_group()


def _is_fake() -> bool:
    return dist.get_backend() == "fake"  # see imagined.py


def _require_backend(device: torch.device) -> None:
    backends = dist.get_backend_config()
    wanted = {"cpu": "gloo", "cuda": "nccl"}[device.type]
    if f"{device.type}:{wanted}" not in backends and not _is_fake():
        raise ConfigError(
            f"the default process group has the backends {backends}; training on {device} needs {device.type}:{wanted}; "
            "initialise it with 'cpu:gloo,cuda:nccl', or let the runtime do it",
            backends=backends,
            device=str(device),
        )
