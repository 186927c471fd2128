"""Starting the ranks of a group, with stand-ins for Ray's cluster and its actors."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from actors.cluster.placement import Slot
from actors.train import order
from actors.train import ranks as ranks_module
from actors.train.order import Driver
from actors.train.outcome import Completed, Failed, RankInfo
from actors.train.ranks import GroupMembers, TrainRanks
from rl_backend.contracts import ConfigError, GroupFailedError, RuntimeConfig
from tests.support.told_ranks import Ref, ToldRay

ASKED: dict[str, Any] = {
    "group_id": "0123456789abcdef",
    "name": "ours",
    "num_ranks": 3,
    "cores_per_rank": 2,
    "gpus_per_rank": 0,
    "placement": "spread",
    "failure_grace": 4.0,
    "placement_timeout": 11.0,
    "start_timeout": 0.05,
}
CONFIG = RuntimeConfig(hf_path="model")


class Cluster:
    """Two nodes, of which the second has two ranks. Keeps what is asked of it."""

    group = "the placement group"
    slots = (Slot(1, "a", 0), Slot(0, "b", 0), Slot(2, "b", 1))

    def __init__(self) -> None:
        self.reserved: dict[str, Any] = {}
        self.removed = 0
        self.killed: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.made: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []
        self.addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
        self.answers: list[Any] = [Completed(None)] * 3

    def scheduling_strategy(self, rank: int) -> str:
        return f"bundle {self.slots[rank].bundle}"

    def remove(self) -> None:
        self.removed += 1

    def reserve(self, **asked: Any) -> Cluster:
        self.reserved = asked
        return self

    def actor(self, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=self.make)

    def make(self, *arguments: Any) -> Any:
        rank = arguments[1]
        self.made.append(arguments)

        def begin(*given: Any) -> Ref:
            self.started.append(given)
            answer = self.answers[rank]
            return Ref(answer, comes=answer is not None)

        return SimpleNamespace(
            locate=SimpleNamespace(
                remote=lambda: Ref(Completed(RankInfo(rank, "abb"[rank], self.addresses[rank], 7 + rank)))
            ),
            open_rendezvous=SimpleNamespace(
                remote=lambda address: Ref(Completed(f"rendezvous of rank {rank} at {address}"))
            ),
            start=SimpleNamespace(remote=begin),
        )


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(ranks_module, "reserve", made.reserve)
    monkeypatch.setattr(ranks_module, "TrainActor", SimpleNamespace(options=made.actor))
    monkeypatch.setattr(ranks_module, "check_config", lambda config, num_ranks: None)
    monkeypatch.setattr(ranks_module, "_warn_of_idle_gpus", lambda config, name, gpus: None)
    monkeypatch.setattr(ranks_module, "thread_environment", lambda: {"WAITS": "asleep"})
    monkeypatch.setattr(ranks_module, "memory_environment", lambda: {"FREED": "given back"})
    monkeypatch.setattr(Driver, "here", lambda: Driver("1", "this driver"))
    monkeypatch.setattr(ranks_module, "ray", ToldRay())
    monkeypatch.setattr(GroupMembers, "kill", lambda members: made.killed.append(members.name))
    return made


def begin(**changed: Any) -> TrainRanks:
    return ranks_module.start_ranks(CONFIG, **{**ASKED, **changed})


def test_every_rank_is_an_actor_with_its_place_and_environment(cluster: Cluster) -> None:
    ranks = begin()
    assert cluster.reserved == {
        "num_ranks": 3,
        "cores_per_rank": 2,
        "gpus_per_rank": 0,
        "strategy": "spread",
        "name": "ours",
        "timeout": 11.0,
    }
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {**dict.fromkeys(names, "2"), "WAITS": "asleep", "FREED": "given back", "CUDA_VISIBLE_DEVICES": ""}
    for rank, (options, arguments) in enumerate(zip(cluster.options, cluster.made, strict=True)):
        assert options == {
            "name": f"ours-01234567-rank{rank}",
            "num_cpus": 2,
            "num_gpus": 0,
            "scheduling_strategy": f"bundle {(1, 0, 2)[rank]}",
            "allow_out_of_order_execution": False,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": environment},
        }
        assert arguments == ("0123456789abcdef", rank, 3, 2, Driver("1", "this driver"))
    for rank, (given, rendezvous, pickled) in enumerate(cluster.started):
        assert given == {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": ("0", "0", "1")[rank]}
        assert rendezvous == "rendezvous of rank 0 at 10.0.0.1" and cloudpickle.loads(pickled) == CONFIG
    assert len(cluster.started) == 3
    assert [(info.node_ip, info.pid) for info in ranks.infos] == [("10.0.0.1", 7), ("10.0.0.2", 8), ("10.0.0.2", 9)]
    ranks.check_usable()
    members: Any = ranks.members
    assert (members.id, members.name, members.placement_group) == ("0123456789abcdef", "ours", cluster.group)
    assert (len(members.workers), members.failure_grace) == (3, 4.0)
    assert not cluster.removed and not cluster.killed


def test_a_rank_with_a_gpu_leaves_its_choice_to_ray(cluster: Cluster) -> None:
    begin(gpus_per_rank=1, name="ours-01234567")
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    for rank, options in enumerate(cluster.options):
        assert options["name"] == f"ours-01234567-rank{rank}" and options["num_gpus"] == 1
        assert options["runtime_env"]["env_vars"] == dict.fromkeys(names, "2")
    assert [environment["LOCAL_RANK"] for environment, *_ in cluster.started] == ["0", "0", "0"]


def test_ranks_of_one_machine_meet_at_its_loopback_address(cluster: Cluster) -> None:
    cluster.addresses = ["10.0.0.2"] * 3
    begin()
    assert {rendezvous for _, rendezvous, _ in cluster.started} == {"rendezvous of rank 0 at 127.0.0.1"}


def test_a_rank_that_does_not_start_in_time_frees_everything(cluster: Cluster) -> None:
    cluster.answers[1] = None
    with pytest.raises(GroupFailedError, match=r"'ours': the ranks did not start within 0.05 s; see Ray's logs, or raise"):
        begin()
    assert cluster.killed == ["ours"] and cluster.removed == 1


def test_a_rank_that_is_stopped_while_it_starts_is_seen_at_once(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[Any] = []

    def pulse(workers: Any, given: Any, stopped: Any) -> Any:
        bounds.append(given)
        return SimpleNamespace(look=lambda: ([1], "is stopped (SIGSTOP)"))

    monkeypatch.setattr(ranks_module, "Pulse", pulse)
    monkeypatch.setattr(ranks_module, "places_in_code", lambda infos: {})
    cluster.answers[1] = None
    with pytest.raises(GroupFailedError, match=r"rank 1 \(process 8 on 10.0.0.2\) is stopped \(SIGSTOP\) in start"):
        begin(start_timeout=30.0)
    assert set(cluster.killed) == {"ours"}
    # Imports and the first use of a GPU may take as long as they like.
    assert {(each.silence, each.operation) for each in bounds} == {(math.inf, math.inf)}


def test_a_rank_that_cannot_start_frees_everything_and_says_why(cluster: Cluster) -> None:
    cluster.answers[2] = Failed(ConfigError("no such model"), "a traceback")
    with pytest.raises(ConfigError, match="no such model"):
        begin()
    assert cluster.killed == ["ours"] and cluster.removed == 1


@pytest.mark.parametrize(
    ("device", "gpus", "refusal"),
    [
        ("cuda", 0, "gpus_per_rank=0: the configuration has device='cuda'; use gpus_per_rank=1"),
        ("cpu", 0.5, "gpus_per_rank=0.5: the configuration has device='cpu'; use gpus_per_rank=0"),
        ("cpu", 1, "gpus_per_rank=1: the configuration has device='cpu'; use gpus_per_rank=0"),
        ("cuda", 0.5, None),
        ("cpu", 0, None),
        ("auto", 1, None),
        ("auto", 0, None),
    ],
)
def test_the_device_and_the_gpus_of_a_rank_go_together(
    cluster: Cluster, device: str, gpus: float, refusal: str | None
) -> None:
    config = RuntimeConfig.model_validate({"hf_path": "model", "backend_cfg": {"device": device}})
    if refusal is None:
        ranks_module.start_ranks(config, **{**ASKED, "gpus_per_rank": gpus})
        return
    with pytest.raises(ConfigError) as caught:
        ranks_module.start_ranks(config, **{**ASKED, "gpus_per_rank": gpus})
    assert str(caught.value) == refusal and not cluster.reserved


def test_a_configuration_that_cannot_work_is_refused_before_anything_is_reserved(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: RuntimeConfig, num_ranks: int) -> None:
        raise ConfigError(f"not with {num_ranks} ranks")

    monkeypatch.setattr(ranks_module, "check_config", refuse)
    with pytest.raises(ConfigError, match="not with 3 ranks"):
        begin()
    assert not cluster.reserved


def test_a_driver_names_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_job_id=lambda: "07")
    monkeypatch.setattr(order, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    monkeypatch.setattr(order, "socket", SimpleNamespace(gethostname=lambda: "a-host"))
    first, second = Driver.here(), Driver.here()
    assert first.id != second.id
    assert first.description == f"copy {first.id[:6]} in process {os.getpid()} on a-host (Ray job 07)"


def test_ranks_in_the_place_of_others_have_names_of_their_own_and_the_driver_of_those(cluster: Cluster) -> None:
    driver = Driver("7", "who operates them")
    ranks = begin(epoch=2, driver=driver)
    assert [options["name"] for options in cluster.options] == [f"ours-01234567-again2-rank{rank}" for rank in range(3)]
    assert {arguments[-1] for arguments in cluster.made} == {driver} and ranks.driver is driver
