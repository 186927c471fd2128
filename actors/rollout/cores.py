"""Which of its node's cores a CPU engine runs on.

The engine chooses where it has landed, because only there are the node's cores known. An abstract socket per core, held for
as long as the process lives, keeps engines of different groups and jobs on one node apart.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from actors.rollout.config import RolloutConfig
from rl_backend.contracts import ConfigError

_claims: list[socket.socket] = []


@dataclass(frozen=True)
class NodePlace:
    """An engine's place among the engines of its group that are on one node.

    Attributes:
        index: counted from 0.
        engines: how many there are.
    """

    index: int = 0
    engines: int = 1


def choose_cores(config: RolloutConfig, engine: int, place: NodePlace) -> tuple[int, ...]:
    """Core numbers for engine ``engine`` of the group, which runs in this process.

    Raises:
        ConfigError: the node does not have the cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    if config.cores is not None:
        return config.cores[engine]
    if config.cores_per_engine is not None:
        return _claim(cores, config.cores_per_engine, place)
    return _even_share(cores, config.tensor_parallel, place)


def _claim(cores: list[int], count: int, place: NodePlace) -> tuple[int, ...]:
    """``count`` cores that no other engine on this node runs on.

    Where Ray was told of more CPUs than the node has cores, those of the engine's own place are shared.
    """
    if count > len(cores):
        raise ConfigError.of(
            "RolloutConfig.cores_per_engine",
            count,
            f"node {socket.gethostname()} lets this process run on {len(cores)} cores, {cores}; ask for fewer, or start "
            "Ray there with --num-cpus of no more than it has",
        )
    first = place.index * count
    order = [cores[(first + offset) % len(cores)] for offset in range(len(cores))]
    chosen: list[int] = []
    for core in order:
        if len(chosen) < count and _try_claim(core):
            chosen.append(core)
    shared = [core for core in order if core not in chosen]
    return tuple(sorted(chosen + shared[: count - len(chosen)]))


def _try_claim(core: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rl_backend_core_{core}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def _even_share(cores: list[int], workers: int, place: NodePlace) -> tuple[int, ...]:
    needed = place.engines * workers
    if len(cores) < needed:
        if workers > 1:
            raise ConfigError.of("RolloutConfig.tensor_parallel", workers, f"needs {needed} cores, there are {len(cores)}")
        return (cores[place.index % len(cores)],)
    size = len(cores) // needed * workers
    return tuple(cores[place.index * size : (place.index + 1) * size])
