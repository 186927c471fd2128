"""The Ray session of an example: the cluster that RAY_ADDRESS names, or one on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import ray
import torch

from rl_backend.contracts import ConfigError


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_each(processes: int) -> int:
    """This machine's cores divided over processes that work at the same time."""
    return max(1, usable_cores() // processes)


@contextmanager
def ray_session(cpus: int) -> Iterator[None]:
    """Connects to ``RAY_ADDRESS``, or starts Ray here with room for ``cpus`` cores' worth of actors.

    Training and sampling take turns, so on one machine their actors may together ask for more cores than there are.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(
            address="local",
            num_cpus=max(cpus, usable_cores()),
            num_gpus=torch.cuda.device_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()


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
        f"{ranks} ranks and {engines} engines take a GPU each, {ranks + engines} together; the cluster has {gpus}: ask for "
        "fewer (one rank and one engine can share a GPU), or add GPUs"
    )


def resolve_dtype(dtype: Literal["auto", "float32", "bfloat16"]) -> Literal["float32", "bfloat16"]:
    """``auto`` is bfloat16 on a cluster with GPUs, else float32."""
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype
