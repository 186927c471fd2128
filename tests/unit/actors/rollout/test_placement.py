"""Where engines may land, and which transport follows from where they did."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.cluster.placement import ClusterShare
from actors.rollout import placement as rollout_placement
from actors.rollout.config import RolloutConfig
from actors.rollout.placement import EnginePlacement, with_share
from actors.sync.push import choose_transport
from actors.sync.staged_transports import PushPlan
from rl_backend.contracts import ConfigError


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_placement, "living_nodes", lambda: [{}, {}])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})


@pytest.mark.usefixtures("two_nodes")
def test_engines_that_reserve_nothing_are_refused_on_several_nodes() -> None:
    for cores in (None, ((0,),)):
        with pytest.raises(ConfigError, match=r"cores_per_engine=None: the cluster has 2 nodes"):
            EnginePlacement(RolloutConfig(model_path="x", cores=cores), None)
    EnginePlacement(RolloutConfig(model_path="x"), ["a strategy of the caller's"])


@pytest.mark.usefixtures("two_nodes")
def test_engines_that_reserve_nothing_cannot_be_spread() -> None:
    with pytest.raises(ConfigError, match="placement='spread': only engines that reserve resources can be placed"):
        EnginePlacement(RolloutConfig(model_path="x", placement="spread"), None)
    with pytest.raises(ConfigError, match="placement='spread'"):
        EnginePlacement(RolloutConfig(model_path="x", cores_per_engine=1, placement="spread"), ["a strategy"])


@pytest.mark.usefixtures("two_nodes")
def test_settings_of_gpus_are_refused_where_the_cluster_gives_engines_a_cpu() -> None:
    for name in ("gpu_memory_utilization", "gpus_per_worker"):
        config = RolloutConfig(model_path="x", cores_per_engine=1, **{name: 0.5})
        with pytest.raises(ConfigError, match=rf"RolloutConfig\.{name}=0\.5: applies to GPU engines only"):
            EnginePlacement(config, ["a strategy"])
    waiting = RolloutConfig(model_path="x", placement_timeout=3.0)
    with pytest.raises(ConfigError, match=r"placement_timeout=3\.0: only engines that reserve"):
        EnginePlacement(waiting, ["a strategy of the caller's"])


def test_engines_that_reserve_nothing_land_on_the_only_node(monkeypatch: pytest.MonkeyPatch, two_nodes: None) -> None:
    monkeypatch.setattr(rollout_placement, "living_nodes", lambda: [{}])
    placed = EnginePlacement(RolloutConfig(model_path="x"), None)
    assert "scheduling_strategy" not in placed.options(0) and placed.device == "cpu"
    assert placed.options(0)["max_restarts"] == 0
    environment = placed.options(0)["runtime_env"]["env_vars"]
    assert environment["THP_MEM_ALLOC_ENABLE"] == "1"
    placed.release()


@pytest.mark.parametrize(("gpus", "bundle"), [(0, {"CPU": 3}), (2, {"CPU": 3, "GPU": 2.0})])
def test_each_engine_has_a_bundle_of_its_own_until_they_are_given_back(
    monkeypatch: pytest.MonkeyPatch, gpus: int, bundle: dict[str, float]
) -> None:
    asked: Any = []
    removed: list[Any] = []
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
    monkeypatch.setattr(rollout_placement, "reserve_bundles", lambda *of: asked.append(of) or "the group")
    monkeypatch.setattr(rollout_placement, "remove_placement_group", removed.append)
    settings: dict[str, Any] = {"tensor_parallel": 2} if gpus else {}
    settings |= {"num_engines": 4, "cores_per_engine": 3 if not gpus else 4}
    bundle = {**bundle, "CPU": settings["cores_per_engine"]}
    placed = EnginePlacement(RolloutConfig(model_path="x", placement="spread", placement_timeout=7.0, **settings), None)
    assert asked == [("RolloutGroup", "engine", bundle, 4, "spread", 7.0)]
    for engine in range(4):
        options = placed.options(engine)
        strategy = options["scheduling_strategy"]
        assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("the group", engine)
        assert (options["num_cpus"], options["num_gpus"]) == (bundle["CPU"], bundle.get("GPU", 0))
        assert bool(options["runtime_env"]["env_vars"]) == (not gpus)
    placed.release()
    placed.release()
    assert removed == ["the group"]


def test_an_engine_on_a_strategy_of_the_callers_takes_its_cores_from_there(two_nodes: None) -> None:
    options = EnginePlacement(RolloutConfig(model_path="x", cores_per_engine=3), ["a strategy"]).options(0)
    assert (options["num_cpus"], options["num_gpus"], options["scheduling_strategy"]) == (3, 0, "a strategy")


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, "cuda"),
        ({"cores_per_engine": 4}, "cuda"),
        ({"cores": ((0,),)}, "cpu"),
        ({"device": "cpu", "cores_per_engine": 4}, "cpu"),
        ({"device": "cuda", "cores_per_engine": 4, "gpus_per_worker": 0.5}, "cuda"),
        ({"tensor_parallel": 2}, "cuda"),
    ],
)
def test_engines_take_the_gpus_that_there_are_unless_they_are_bound_to_cores(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    config = RolloutConfig(model_path="x", **settings)
    monkeypatch.setattr(rollout_placement, "living_nodes", lambda: [{}])
    placed = EnginePlacement(config, ["a strategy"])
    options = placed.options(0)
    assert placed.device == device and options["num_cpus"] == settings.get("cores_per_engine", 0)
    gpus = settings.get("gpus_per_worker", 1) * settings.get("tensor_parallel", 1)
    assert options["num_gpus"] == (gpus if device == "cuda" else 0)


@pytest.mark.parametrize(
    ("given", "gpus", "expected"),
    [
        ({}, 0, {"cores_per_engine": 4}),
        ({}, 1, {"cores_per_engine": 4, "gpus_per_worker": 1}),
        ({}, 0.5, {"cores_per_engine": 4, "gpus_per_worker": 0.5, "gpu_memory_utilization": 0.4}),
        ({"cores": ((0, 1),)}, 0, {}),
        ({"cores_per_engine": 2}, 1, {"gpus_per_worker": 1}),
        ({"gpus_per_worker": 0.25}, 0.5, {"cores_per_engine": 4, "gpu_memory_utilization": 0.4}),
        ({"gpu_memory_utilization": 0.7}, 0.5, {"cores_per_engine": 4, "gpus_per_worker": 0.5}),
        ({"kv_cache_gib": 2.0}, 0.5, {"cores_per_engine": 4, "gpus_per_worker": 0.5}),
        ({"device": "cpu"}, 0.5, {"cores_per_engine": 4}),
        ({"cores": ((0, 1),)}, 1, {}),
        ({}, 0.6, {"cores_per_engine": 4, "gpus_per_worker": 0.4, "gpu_memory_utilization": 0.4}),
        (
            {"sleep_mode": True},
            0.6,
            {"cores_per_engine": 4, "gpus_per_worker": 0.4, "gpu_memory_utilization": 0.7},
        ),
    ],
)
def test_engines_take_their_share_of_the_cluster_where_they_do_not_say_otherwise(
    given: dict[str, Any], gpus: float, expected: dict[str, Any]
) -> None:
    config = RolloutConfig(model_path="x", **given)
    assert with_share(config, ClusterShare(3, 4, gpus)) == config.replace(**expected)


@pytest.mark.parametrize("given", [{}, {"gpus_per_worker": 1.0}], ids=["none", "whole ones"])
def test_engines_of_several_workers_share_no_gpus_with_ranks(given: dict[str, Any]) -> None:
    config = RolloutConfig(model_path="x", tensor_parallel=2, **given)
    assert with_share(config, ClusterShare(3, 4, 1)).gpus_per_worker == 1
    refusal = r"^RolloutConfig\.tensor_parallel=2: an engine of several workers takes whole GPUs, and gpus_per_worker=0\.4"
    with pytest.raises(ConfigError, match=refusal):
        with_share(config, ClusterShare(3, 4, 0.6))


@pytest.mark.usefixtures("two_nodes")
def test_engines_on_gpus_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"RolloutConfig\.device='cuda': the Ray cluster has no GPU"):
        EnginePlacement(RolloutConfig(model_path="x", device="cuda"), ["a strategy"])


def plan(node_id: str, host: str, device_ids: tuple[str, ...] = ()) -> PushPlan:
    return PushPlan("key", None, "float32", None, 0, (), node_id, host, device_ids)


def engines(*places: tuple[str, str]) -> Any:
    infos = {
        number: SimpleNamespace(node_id=node_id, host=host, device="cpu", device_ids=())
        for number, (node_id, host) in enumerate(places)
    }
    return SimpleNamespace(infos=infos, engines=tuple(infos))


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([("a", "host")], "shared_memory"),
        ([("a", "host"), ("a", "host")], "shared_memory"),
        ([("b", "host")], "gloo"),
        ([("a", "host"), ("b", "host")], "gloo"),
        ([("a", "container")], "gloo"),
    ],
)
def test_shared_memory_is_chosen_on_one_ray_node_with_one_dev_shm_only(places: Any, expected: str) -> None:
    assert choose_transport(plan("a", "host"), engines(*places)).name == expected


class Asked:
    """``ray``, as far as an environment of engines is asked for."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.places: list[dict[str, Any]] = []
        self.executables: list[str] = []

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def remote(self, **options: Any) -> Any:
        return lambda function: self

    def options(self, **place: Any) -> Any:
        self.places.append(place)
        return SimpleNamespace(remote=self.executables.append)

    def get(self, calls: list[None]) -> list[str]:
        return self.answers[: len(calls)]


def test_the_python_of_engines_is_asked_for_where_each_of_them_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[Any] = []
    monkeypatch.setattr(rollout_placement, "living_nodes", lambda: [{}])
    monkeypatch.setattr(rollout_placement, "reserve_bundles", lambda *of: "the group")
    monkeypatch.setattr(rollout_placement, "remove_placement_group", removed.append)
    config = RolloutConfig(model_path="x", num_engines=2, py_executable="/opt/my engines/bin/python")

    def asked(*answers: str, scheduling: Any = None, **changes: Any) -> Asked:
        monkeypatch.setattr(rollout_placement, "ray", found := Asked(*answers))
        placed = EnginePlacement(config.replace(**changes), scheduling)
        assert placed.options(0)["runtime_env"]["py_executable"] == "'/opt/my engines/bin/python'", "for a shell"
        return found

    assert asked("").places == [{}]
    assert asked("", "", scheduling=["one", "two"]).places == [{"scheduling_strategy": each} for each in ("one", "two")]
    found = asked("", "", cores_per_engine=1)
    assert [place["scheduling_strategy"].placement_group_bundle_index for place in found.places] == [0, 1]
    assert found.executables == ["/opt/my engines/bin/python"] * 2 and removed == []
    with pytest.raises(ConfigError, match=r"py_executable='/opt/my engines/bin/python': it has no Ray$"):
        asked("", "it has no Ray", cores_per_engine=1)
    assert removed == ["the group"], "what was reserved is given back"
    monkeypatch.setattr(rollout_placement, "ray", Asked())
    assert "py_executable" not in EnginePlacement(RolloutConfig(model_path="x"), None).options(0)["runtime_env"]
