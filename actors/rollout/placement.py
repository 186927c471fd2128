"""Which nodes a group's engines run on, and what they reserve there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.placement import living_nodes, reserve_bundles
from actors.rollout.config import RolloutConfig, check_engine_device
from actors.rollout.cores import NodePlace
from actors.rollout.vllm.process import process_environment
from rl_backend.contracts import ConfigError


class EnginePlacement:
    """Ray options of every engine's actor, and the resources that they hold.

    Args:
        config: of the group.
        scheduling: for each engine a Ray scheduling strategy of the caller's; None reserves a placement group when the
            engines need CPUs or GPUs of their own.

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

    def options(self, engine: int) -> dict[str, Any]:
        """Keyword arguments of ``ActorClass.options``."""
        bundle = self._bundle()
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": 0,
            "runtime_env": {"env_vars": process_environment(self.device)},
        }
        if self._scheduling is not None:
            options["scheduling_strategy"] = self._scheduling[engine]
        return options

    def release(self) -> None:
        """Gives back what was reserved."""
        if self._reserved is not None:
            remove_placement_group(self._reserved)
            self._reserved = None

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
        for name in ("placement", "placement_timeout"):
            if self._config.is_set(name):
                raise ConfigError.of(
                    f"RolloutConfig.{name}",
                    getattr(self._config, name),
                    "only engines that reserve resources can be placed: set cores_per_engine, and give no scheduling",
                )
        nodes = len(living_nodes())
        if self._scheduling is None and nodes > 1:
            raise ConfigError.of(
                "RolloutConfig.cores_per_engine",
                None,
                f"the cluster has {nodes} nodes, and engines that reserve nothing could land on any of them; set "
                "cores_per_engine",
            )


def resolve_device(config: RolloutConfig) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        ConfigError: settings of the other device, or CUDA on a cluster without GPUs.
    """
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0
    device = config.device if config.device != "auto" else ("cuda" if has_gpu and config.cores is None else "cpu")
    if device == "cuda" and not has_gpu:
        raise ConfigError.of("RolloutConfig.device", "cuda", "the Ray cluster has no GPU")
    check_engine_device(config, device)
    return device


def places_on_nodes(nodes: Mapping[int, str]) -> dict[int, NodePlace]:
    """Each engine's place on its node, from engine number -> node id."""
    on_node: dict[str, list[int]] = {}
    for engine in sorted(nodes):
        on_node.setdefault(nodes[engine], []).append(engine)
    return {engine: NodePlace(index, len(engines)) for engines in on_node.values() for index, engine in enumerate(engines)}
