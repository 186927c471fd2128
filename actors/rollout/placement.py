"""Placement of engines: nodes, what they reserve there, and cores of a node."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.environments import why_not_for_engines
from actors.cluster.placement import ClusterShare, living_nodes, reserve_bundles
from actors.rollout.config import RolloutConfig, check_engine_device
from actors.rollout.vllm.process import process_environment
from rl_backend.contracts import ConfigError

# An engine chooses its cores where it has landed, because only there are they known. An abstract socket per core, held for
# as long as the process lives, keeps engines of different groups and jobs on one node apart.
_claims: list[socket.socket] = []


@dataclass(frozen=True)
class NodePlace:
    """An engine's place among the engines of its group that are on one node, counted from 0."""

    index: int = 0
    engines: int = 1


def choose_cores(config: RolloutConfig, engine: int, place: NodePlace) -> tuple[int, ...]:
    """Core numbers for an engine, which runs in this process; raises where the node does not have them."""
    cores = sorted(os.sched_getaffinity(0))
    if config.cores is not None:
        return config.cores[engine]
    if config.cores_per_engine is not None:
        return _claim(cores, config.cores_per_engine, place)
    return _even_share(cores, config.tensor_parallel, place)


def _claim(cores: list[int], count: int, place: NodePlace) -> tuple[int, ...]:
    if count > len(cores):
        raise ConfigError.of(
            "RolloutConfig.cores_per_engine",
            count,
            f"node {socket.gethostname()} lets this process run on {len(cores)} cores, {cores}; ask for fewer, or start "
            "Ray there with --num-cpus of no more than it has",
        )
    # From its own place on, so that engines that start together seldom try the same cores.
    first = place.index * count
    order = [cores[(first + offset) % len(cores)] for offset in range(len(cores))]
    chosen: list[int] = []
    for core in order:
        if len(chosen) < count and _try_claim(core):
            chosen.append(core)
    # Where Ray was told of more CPUs than the node has cores, those of the engine's own place are shared.
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


class EnginePlacement:
    """Ray options of every engine's actor, and the resources that they hold.

    Args:
        scheduling: for each engine a Ray scheduling strategy of the caller's; None reserves what the engines need.

    Raises:
        ConfigError: settings that do not go together on this cluster.
        UnsupportedError: the cluster does not have the resources in time.
    """

    def __init__(self, config: RolloutConfig, scheduling: Sequence[Any] | None) -> None:
        self.device = resolve_device(config)
        self._config = config
        self._scheduling = scheduling
        self._reserved: PlacementGroup | None = None
        bundle = self._bundle()
        if scheduling is None and bundle:
            self._reserve(bundle)
        else:
            self._check_unreserved()
        if config.py_executable is not None:
            self._require_environment(config.py_executable)

    def options(self, engine: int) -> dict[str, Any]:
        bundle = self._bundle()
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "runtime_env": {"env_vars": process_environment(self.device)},
        }
        if self._config.py_executable is not None:
            # Ray gives it to a shell.
            options["runtime_env"]["py_executable"] = shlex.quote(self._config.py_executable)
        if self._scheduling is not None:
            options["scheduling_strategy"] = self._scheduling[engine]
        return options

    def release(self) -> None:
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None

    def _require_environment(self, executable: str) -> None:
        """Asks the Python of engines where each of them will be."""
        task: Any = ray.remote(num_cpus=0, max_retries=0)(why_not_for_engines)
        places = [{}] if self._scheduling is None else [{"scheduling_strategy": each} for each in self._scheduling]
        try:
            problems = ray.get([task.options(**place).remote(executable) for place in places])
            found = sorted(set(problems) - {""})
            ConfigError.refuse_all(("RolloutConfig.py_executable", executable, problem) for problem in found)
        except BaseException:
            self.release()
            raise

    def _bundle(self) -> dict[str, float]:
        cpus, gpus = self._config.cores_per_engine, self._config.gpus_per_worker * self._config.tensor_parallel
        return {**({"CPU": cpus} if cpus else {}), **({"GPU": gpus} if self.device == "cuda" else {})}

    def _reserve(self, bundle: dict[str, float]) -> None:
        config, count = self._config, self._config.num_engines
        self._reserved = reserve_bundles("RolloutGroup", "engine", bundle, count, config.placement, config.placement_timeout)
        self._scheduling = [
            PlacementGroupSchedulingStrategy(self._reserved, placement_group_bundle_index=engine) for engine in range(count)
        ]

    def _check_unreserved(self) -> None:
        problem = "only engines that reserve resources can be placed: set cores_per_engine, and give no scheduling"
        wrong = {name: problem for name in ("placement", "placement_timeout") if self._config.is_set(name)}
        nodes = len(living_nodes())
        if self._scheduling is None and nodes > 1:
            wrong["cores_per_engine"] = (
                f"the cluster has {nodes} nodes, and engines that reserve nothing could land on any of them; set it"
            )
        ConfigError.refuse_all((f"RolloutConfig.{name}", getattr(self._config, name), wrong[name]) for name in wrong)


def resolve_device(config: RolloutConfig) -> str:
    """``cpu`` or ``cuda``; raises :class:`ConfigError` for settings of the other, or CUDA on a cluster without GPUs."""
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    device = config.device if config.device != "auto" else ("cuda" if has_gpu and config.cores is None else "cpu")
    if device == "cuda" and not has_gpu:
        raise ConfigError.of("RolloutConfig.device", "cuda", "the Ray cluster has no GPU")
    check_engine_device(config, device)
    return device


def places_on_nodes(nodes: Mapping[int, str]) -> dict[int, NodePlace]:
    on_node: dict[str, list[int]] = {}
    for engine in sorted(nodes):
        on_node.setdefault(nodes[engine], []).append(engine)
    return {engine: NodePlace(index, len(engines)) for engines in on_node.values() for index, engine in enumerate(engines)}


def with_share(config: RolloutConfig, share: ClusterShare) -> RolloutConfig:
    """Raises :class:`ConfigError` for engines of several workers that would share GPUs with ranks."""
    of_share: dict[str, Any] = {}
    if config.cores is None and config.cores_per_engine is None:
        of_share["cores_per_engine"] = share.cores_per_engine
    gpus = 0.0 if config.device == "cpu" or config.cores is not None else share.gpus_per_engine
    if gpus and not config.is_set("gpus_per_worker"):
        of_share["gpus_per_worker"] = gpus
    if 0 < gpus < 1 and config.kv_cache_gib is None and not config.is_set("gpu_memory_utilization"):
        # The training rank has the rest of the GPU. Where it leaves it while engines are awake, that is little: its context.
        of_share["gpu_memory_utilization"] = 0.7 if config.sleep_mode else 0.4
    return config.replace(**of_share)
