"""The Ray session of an example: the cluster that RAY_ADDRESS names, or one on this machine; and how a run divides it.

with (
    RunLock(config.run_dir) as lock,
    ray_session(config.ranks, config.engines),
    TrainGroup(
        config.runtime_config(),
        config.ranks,
        (share := share_cluster(config.ranks, config.engines)).cores_per_rank,
        share.gpus,
        placement=config.placement,
    ) as trainer,
    RolloutGroup(
        RolloutConfig(..., cores_per_engine=share.cores_per_engine, placement=config.placement)
    ) as rollout,
    RunFolder(config.run_dir, config, lock=lock) as folder,
):
    require_paths(trainer, config.model, folder.path)
    policy = trainer.build_model()
"""

from __future__ import annotations

import logging
import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import ray
import torch
from ray.exceptions import RayError

from actors import RankContext, TrainGroup
from actors.cluster.local_ray import init_local_ray, join_ray
from actors.cluster.placement import living_nodes
from actors.cluster.watch import ray_is_usable, watch_cluster
from examples.common.disk import usable_run_dir
from examples.common.termination import RunTerminated, raised_on_sigterm
from rl_backend.contracts import ConfigError


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_each(processes: int) -> int:
    """This machine's cores divided over processes that work at the same time."""
    return max(1, usable_cores() // max(1, processes))


@contextmanager
def ray_session(ranks: int, engines: int = 0) -> Iterator[None]:
    """Connects to the cluster of ``RAY_ADDRESS``, or starts Ray here for that many training ranks and engines.

    Ray that is started here listens on the loopback address alone, and is told of enough CPUs for ranks and engines to
    reserve all cores each, because training and sampling take turns. Within the session SIGTERM raises
    :class:`~examples.common.termination.RunTerminated`.

    Raises:
        ConfigError: no cluster answers at ``RAY_ADDRESS``, or it refuses this process's token.
        ClusterLostError: Ray's servers ended meanwhile; see :func:`~actors.cluster.watch.watch_cluster`.
    """
    if ray.is_initialized():
        with raised_on_sigterm():
            yield
        return
    try:
        _start_or_join(ranks, engines)
    except SystemExit as error:
        if error.code == signal.SIGTERM:  # Ray's own answer to it, from the beginning of ray.init
            raise RunTerminated from None
        raise
    with raised_on_sigterm():
        try:
            with watch_cluster():
                yield
        finally:
            if ray_is_usable():
                ray.shutdown()


def _start_or_join(ranks: int, engines: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ:
        try:
            join_ray(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise ConfigError.of(
                "RAY_ADDRESS",
                os.environ["RAY_ADDRESS"],
                f"{error}; check that it is the head node's HOST:PORT, and that this process has the cluster's token "
                "(RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH)",
            ) from None
    else:
        init_local_ray(
            num_cpus=max(usable_cores(), ranks) + max(usable_cores(), engines),
            num_gpus=torch.cuda.device_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


class Share(NamedTuple):
    """What each process of a run reserves.

    Attributes:
        gpus: of each training rank and each engine; see :func:`gpus_each`.
    """

    cores_per_rank: int
    cores_per_engine: int
    gpus: float


def share_cluster(ranks: int, engines: int = 0, *, take_turns: bool = True) -> Share:
    """Divides the cluster over training ranks and engines.

    Where all CPUs are this machine's and Ray counts enough of them, as in :func:`ray_session`, ranks divide its cores and
    so do engines, because they take turns. Else each rank and engine has as many CPUs of its own as fit, all equally many.

    Args:
        take_turns: False where training and sampling go on at the same time, on cores of their own.

    Raises:
        ConfigError: fewer CPUs or GPUs than ranks and engines.
    """
    gpus = gpus_each(ranks, engines)
    nodes = [node for node in living_nodes() if node["Resources"].get("CPU", 0) >= 1]
    if len(nodes) == 1 and nodes[0]["NodeID"] == ray.get_runtime_context().get_node_id():
        members = (ranks, engines) if take_turns else (ranks + engines, ranks + engines)
        rank, engine = map(cores_each, members)
        if ranks * rank + engines * engine <= nodes[0]["Resources"]["CPU"]:
            return Share(rank, engine, gpus)
    cpus = [int(node["Resources"]["CPU"]) for node in nodes]
    places = [int(node["Resources"].get("GPU", 0) / gpus) if gpus else ranks + engines for node in nodes]
    for cores in range(max(cpus, default=0), 0, -1):
        fit = sum(min(count // cores, most) for count, most in zip(cpus, places, strict=True))
        if fit >= ranks + engines:
            return Share(cores, cores, gpus)
    raise ConfigError(
        f"{ranks} ranks and {engines} engines take at least a CPU each, {ranks + engines} together; the cluster's nodes "
        f"have {cpus} CPUs{f' and GPUs for {places} of them' if gpus else ''}: ask for fewer, or add nodes"
    )


def gpus_each(ranks: int, engines: int) -> float:
    """GPUs of each training rank and engine: 0 on a cluster without, 1, or half of an only one that both share.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0 or gpus >= ranks + engines:
        return min(gpus, 1)
    if gpus == ranks == engines == 1:
        return 0.5
    raise ConfigError(
        f"{ranks} training ranks, of all groups, and {engines} engines take a GPU each; the cluster has {gpus}: ask for "
        "fewer (one rank and one engine can share a GPU), or add GPUs"
    )


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16"]) -> Literal["float32", "bfloat16"]:
    """``auto`` is bfloat16 on a cluster with GPUs, else float32."""
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype


def require_paths(trainer: TrainGroup, model: str, run_dir: Path) -> None:
    """Checks, before a model is loaded, that every rank's node has the model and sees this process's run folder.

    Engines check the model themselves when they start.

    Args:
        model: Hugging Face directory, at the same path on every node.
        run_dir: exists here; ranks write checkpoints to it.

    Raises:
        ConfigError: names the node and the path.
    """
    mark = run_dir.resolve() / f".visible-{uuid.uuid4().hex}"
    with usable_run_dir(run_dir):
        mark.touch()
    try:
        seen = trainer.run_on_ranks(_look_for_paths, model, str(mark))
    finally:
        mark.unlink()
    for info, (has_model, sees_run_dir) in zip(trainer.ranks, seen, strict=True):
        where = f"on node {info.node_ip} (Ray node {info.node_id}), where training rank {info.rank} runs"
        if not has_model:
            raise ConfigError.of(
                "model", model, f"is not a Hugging Face directory {where}; a model has the same path on every node"
            )
        if not sees_run_dir:
            raise ConfigError.of(
                "run_dir",
                str(run_dir.resolve()),
                f"is not seen {where}; give a folder on a file system that all nodes share, for the ranks write the trained "
                "model to it",
            )


def _look_for_paths(context: RankContext, model: str, mark: str) -> tuple[bool, bool]:
    return (Path(model) / "config.json").is_file(), Path(mark).is_file()
