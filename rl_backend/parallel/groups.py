"""Process groups and device meshes of a rank, and the store where the ranks of a job meet."""

import errno
import ipaddress
import itertools
import os
import socket
import sys
from collections.abc import Generator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from rl_backend.contracts import ConfigError, ParallelConfig

LOOPBACK = "127.0.0.1"

# Longer than what one rank may do while the others wait: to write a Hugging Face directory to a slow disk, say.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others, when the groups are made and in every collective, unless a configuration says
otherwise.
"""

_DEVICE_FILES = Path("/dev")

_num_met = itertools.count()
_num_opened = itertools.count()


def host_store(timeout: timedelta) -> TCPStore:
    """A store that this process serves on a free port of the loopback address; its ``get`` and ``wait`` wait for
    ``timeout``.
    """
    # torch's own rendezvous binds a store to all interfaces, where everyone who reaches the machine may read and write it.
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
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name, "lo")


def job_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Store, rank and number of ranks, from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    All ranks of a job call it equally often, before each default process group. With ``MASTER_ADDR`` a loopback address
    the job is on one machine: rank 0 serves the store on that address alone, unless an agent (torchrun) serves one, and
    gloo and NCCL are told to prefer the loopback interface. ``ValueError`` and ``OSError`` are torch's.
    """
    complete = {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if complete and not has_agent and _is_loopback(os.environ["MASTER_ADDR"]):
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
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        # A store of this process may be there already; torch shares it, or says that the port is taken.
    return TCPStore(host, port, world_size, True, timeout=timeout, multi_tenant=True, **serve)


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """This rank's device and its place in the layout, whichever runtime made the groups.

    Attributes:
        dp_rank, dp_size: place among the ranks that see different data.
        dp_group: ranks that differ in it only.
        replica_group: the ranks that hold parts of one model, and so see the same data.
        world_group: all ranks, for collectives on ``device``.
        host_group: all ranks over gloo, for collectives on the CPU from any one thread at a time; never used by forward,
            backward or the optimizer.
        timeout: how long a collective waits for a rank.
    """

    parallel: ParallelConfig
    device: torch.device
    dp_rank: int
    dp_size: int
    dp_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    host_group: dist.ProcessGroup
    timeout: timedelta

    @property
    def world_size(self) -> int:
        return self.world_group.size()


@dataclass(frozen=True, kw_only=True)
class ParallelGroups(RankGroups):
    """Ranks are numbered pp first, then dp, cp, and tp fastest.

    Attributes:
        mesh: the ranks of this pipeline rank: dp and cp together (``fsdp_mesh``), over which parameters are sharded, by tp.
        expert_mesh: the same ranks as expert-data-parallel ranks (``edp_mesh``) by ep by etp, for the parameters of experts.
        ep_mesh: its second dimension and, where experts are cut over etp, its third.
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


@dataclass
class _DefaultGroup:
    made_here: bool = False
    users: int = 0


_default_group = _DefaultGroup()


def training_device(name: str) -> torch.device:
    """The device of this rank for ``auto``, ``cpu`` or ``cuda``; CUDA devices are numbered by ``LOCAL_RANK`` (0 without it).
    Raises :class:`ConfigError`: there is no such device, or for ``auto`` one that torch cannot use.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if name == "auto" and (unused := _visible_gpus()):
            raise ConfigError.of(
                "device",
                name,
                f"this machine has {unused[0]}, which torch {torch.__version__} cannot use: it is built for CPUs, or the "
                "driver is too old (`rl-backend doctor` says which); mend that, or use 'cpu'",
            )
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError.of(
            "device",
            name,
            f"this process sees {count} CUDA devices, none of the number LOCAL_RANK={index}; use fewer ranks on "
            "this machine, or 'cpu'",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _visible_gpus() -> list[str]:
    """Device files of NVIDIA's GPUs, unless the environment hides them, as it does from ranks that are given none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return []
    return sorted(map(str, _DEVICE_FILES.glob("nvidia[0-9]*")))


def open_groups(parallel: ParallelConfig, device: torch.device, timeout: timedelta = COLLECTIVE_TIMEOUT) -> ParallelGroups:
    """Makes the groups of the layout. A collective over all ranks of the job.

    Uses the default process group, or first makes it: from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``
    when ``WORLD_SIZE`` is set, else of this process alone. :func:`close_groups` undoes it. Raises :class:`ConfigError`:
    the world size does not fit ``parallel``, or a default group cannot communicate on ``device``.
    """
    join_default_group(device, timeout)
    try:
        return _open(parallel, device, timeout)
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


class _Subgroups:
    """This rank's groups of ranks that differ in some dimensions of a grid only."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.opened: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def along(self, grid: Tensor, *dimensions: int) -> dist.ProcessGroup:
        """The group along ``dimensions`` of ``grid``, in the order of its ranks' numbers. A collective over all ranks."""
        last = tuple(range(-len(dimensions), 0))
        rows = grid.movedim(dimensions, last).flatten(-len(dimensions)).flatten(0, -2)
        partition = tuple(tuple(row) for row in rows.tolist())
        if len(partition) == 1:
            return world_group()
        # Each partition of the ranks is opened once: a gloo group costs three threads, one of NCCL memory on the device.
        if partition not in self.opened:
            mine, _ = dist.new_subgroups_by_enumeration([list(row) for row in partition], timeout=self._timeout)
            assert mine is not None, "every rank is in one row"
            self.opened[partition] = mine
        return self.opened[partition]


def _open(parallel: ParallelConfig, device: torch.device, timeout: timedelta) -> ParallelGroups:
    world_size = dist.get_world_size()
    dp_size = parallel.data_parallel_size(world_size)
    ranks = torch.arange(world_size)
    dense = ranks.view(parallel.pp, dp_size, parallel.cp, parallel.tp)
    experts = ranks.view(parallel.pp, -1, parallel.ep, parallel.etp)
    groups = _Subgroups(timeout)
    pp_group, dp_group, cp_group, tp_group = (groups.along(dense, dimension) for dimension in range(4))
    pp_rank = pp_group.rank()
    # DTensor's caches take meshes of equal names and ranks for one mesh, even after the groups of one are gone.
    unique = next(_num_opened)
    fsdp, tp, edp, ep, etp = (f"{name}_{unique}" for name in ("fsdp", "tp", "edp", "ep", "etp"))
    mesh = DeviceMesh.from_group(
        [groups.along(dense, 1, 2), tp_group], device.type, dense[pp_rank].flatten(0, 1), mesh_dim_names=(fsdp, tp)
    )
    expert_mesh = DeviceMesh.from_group(
        [groups.along(experts, dimension) for dimension in range(1, 4)],
        device.type,
        experts[pp_rank],
        mesh_dim_names=(edp, ep, etp),
    )
    backend = "fake" if _is_fake() else "gloo"
    host_group = dist.new_group(backend=backend, timeout=timeout)
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
        token_group=groups.along(dense, 2, 3),
        replica_group=groups.along(dense, 0, 2, 3),
        expert_group=groups.along(experts, 2, 3),
        world_group=world_group(),
        host_group=host_group,
        timeout=timeout,
        made=(host_group, *groups.opened.values()),
    )


def world_group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "joined before"
    return world


def join_default_group(device: torch.device, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Makes the default process group if there is none, and counts its users; :func:`leave_default_group` undoes it. Raises
    :class:`ConfigError`: a default group that cannot communicate on ``device``.
    """
    if not dist.is_initialized():
        on_cuda = device.type == "cuda"
        alone = "WORLD_SIZE" not in os.environ
        store, rank, world_size = (dist.HashStore(), 0, 1) if alone else job_store(timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
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
    return dist.get_backend() == "fake"  # see fake_rank


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


META = torch.device("meta")


@contextmanager
def fake_rank(parallel: ParallelConfig, rank: int, world_size: int) -> Generator[ParallelGroups]:
    """The groups of global rank ``rank``, with which a model can be laid out, and run, on the meta device.

    They are torch's fake process groups: the other ranks do not exist, and collectives return at once and move nothing.
    For a process without a process group.
    """
    # Importing it makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as undone:
        # torch puts the rank before every line of an error, once more with each group.
        undone.callback(setattr, sys, "excepthook", sys.excepthook)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        undone.callback(dist.destroy_process_group)
        groups = open_groups(parallel, torch.device("cpu"))
        undone.callback(close_groups, groups)
        yield replace(groups, device=META)
