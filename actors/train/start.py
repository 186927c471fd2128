"""Starting the ranks of a training group."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import ray
from ray import cloudpickle

from actors.cluster.placement import PlacementStrategy, Reservation, reserve, thread_environment
from actors.cluster.rendezvous import rendezvous_address
from actors.train.order import Driver
from actors.train.ranks import GroupMembers, TrainRanks
from actors.train.worker import TrainActor
from rl_backend.contracts import ConfigError, RuntimeConfig
from rl_backend.runtime import check_config

logger = logging.getLogger(__name__)


def start_ranks(
    config: RuntimeConfig,
    *,
    group_id: str,
    name: str,
    num_ranks: int,
    cores_per_rank: int,
    gpus_per_rank: float,
    placement: PlacementStrategy,
    failure_grace: float,
    placement_timeout: float,
    start_timeout: float,
) -> TrainRanks:
    """Reserves resources, starts one actor per rank and builds the runtimes; frees everything when that fails."""
    _check_device(config, gpus_per_rank)
    check_config(config, num_ranks)
    placed = reserve(
        num_ranks=num_ranks,
        cores_per_rank=cores_per_rank,
        gpus_per_rank=gpus_per_rank,
        strategy=placement,
        name=name,
        timeout=placement_timeout,
    )
    _warn_of_idle_gpus(config, name, gpus_per_rank)
    try:
        return _start(config, placed, group_id, name, cores_per_rank, gpus_per_rank, failure_grace, start_timeout)
    except BaseException:
        placed.remove()
        raise


def _start(
    config: RuntimeConfig,
    placed: Reservation,
    group_id: str,
    name: str,
    cores: int,
    gpus: float,
    failure_grace: float,
    timeout: float,
) -> TrainRanks:
    num_ranks = len(placed.slots)
    driver = Driver.here()
    prefix = name if group_id[:8] in name else f"{name}-{group_id[:8]}"
    workers = tuple(
        TrainActor.options(
            name=f"{prefix}-rank{rank}",
            num_cpus=cores,
            num_gpus=gpus,
            scheduling_strategy=placed.scheduling_strategy(rank),
            allow_out_of_order_execution=False,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": _process_environment(cores, gpus)},
        ).remote(group_id, rank, num_ranks, cores, driver)
        for rank in range(num_ranks)
    )
    ranks = TrainRanks(GroupMembers(group_id, name, workers, placed.group, failure_grace), driver, owned=True)
    try:
        # Waiting for every process first keeps a slow one from looking like one that hangs.
        nodes = ranks.collect("start", 0, [worker.node_address.remote() for worker in workers], timeout)
        (rendezvous,) = ranks.collect("start", 0, [workers[0].open_rendezvous.remote(rendezvous_address(nodes))], timeout)
        pickled = cloudpickle.dumps(config)
        refs = [
            worker.start.remote(_rank_environment(rank, num_ranks, placed, gpus), rendezvous, pickled)
            for rank, worker in enumerate(workers)
        ]
        ranks.infos = tuple(ranks.collect("start", 0, refs, timeout))
    except TimeoutError:
        ranks.fail(f"the ranks did not start within {timeout:g} s; see Ray's logs, or raise start_timeout")
    except BaseException:
        ranks.end()
        raise
    return ranks


def _warn_of_idle_gpus(config: RuntimeConfig, name: str, gpus_per_rank: float) -> None:
    if getattr(config.backend_cfg, "device", "auto") != "auto" or gpus_per_rank:
        return
    if count := int(ray.cluster_resources().get("GPU", 0)):
        logger.warning(
            "%s trains on CPUs although the cluster has %d GPUs: a rank takes none unless gpus_per_rank says so. Use "
            "gpus_per_rank=1, or device='cpu' in the configuration",
            name,
            count,
        )


def _check_device(config: RuntimeConfig, gpus_per_rank: float) -> None:
    device = getattr(config.backend_cfg, "device", "auto")
    if device == "cuda" and gpus_per_rank == 0:
        raise ConfigError.of("gpus_per_rank", gpus_per_rank, "the configuration has device='cuda'; use gpus_per_rank=1")
    if device == "cpu" and gpus_per_rank > 0:
        raise ConfigError.of("gpus_per_rank", gpus_per_rank, "the configuration has device='cpu'; use gpus_per_rank=0")


def _process_environment(cores: int, gpus: float) -> dict[str, str]:
    threads = {name: str(cores) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    # Without a GPU of its own a rank must not see those of others; with one, Ray sets this.
    return threads if gpus else {**threads, **thread_environment(), "CUDA_VISIBLE_DEVICES": ""}


def _rank_environment(rank: int, num_ranks: int, placed: Reservation, gpus: float) -> Mapping[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": "0" if gpus else str(placed.slots[rank].index_on_node),
    }
