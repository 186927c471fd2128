"""A training rank as it starts, without Ray and without peers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

from actors.cluster.processes import start_time
from actors.train import worker
from actors.train.order import Driver
from actors.train.outcome import Completed, Failed, RankInfo
from rl_backend.contracts import ConfigError


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch is told to compute with."""
    told: list[int] = []
    monkeypatch.setattr(worker, "RendezvousRoute", lambda rendezvous: SimpleNamespace(port=1234))
    monkeypatch.setattr(worker, "use_interface", lambda host: os.environ.update(INTERFACE_OF_TEST=host))
    monkeypatch.setattr(worker, "node_address", lambda: "10.0.0.7")
    monkeypatch.setattr(worker, "store_environment", lambda port: {"STORE_PORT_OF_TEST": str(port)})
    monkeypatch.setattr(worker.torch, "set_num_threads", told.append)
    context = SimpleNamespace(get_node_id=lambda: "a node")
    monkeypatch.setattr(worker.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return told


def start(rank: int, world_size: int, cores: int) -> tuple[worker.TrainWorker, Any]:
    made = worker.TrainWorker("group", rank, world_size, cores, Driver("1", "a driver"))
    rendezvous: Any = SimpleNamespace(host="10.0.0.1")
    return made, made.start({"OMP_NUM_THREADS": str(cores)}, rendezvous, cloudpickle.dumps("a config"))


@pytest.mark.parametrize(("rank", "world_size", "cores"), [(0, 1, 1), (2, 3, 4)])
def test_a_rank_computes_with_its_cores_and_knows_its_place(
    rank: int, world_size: int, cores: int, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(config: str) -> str:
        assert os.environ["STORE_PORT_OF_TEST"] == "1234" and os.environ["OMP_NUM_THREADS"] == str(cores)
        assert threads == [cores], "a runtime may compute when it is made"
        assert os.environ["INTERFACE_OF_TEST"] == "10.0.0.1", "where the ranks meet, not this node's address"
        return f"runtime of {config}"

    monkeypatch.setattr(worker, "create_runtime", create)
    made, outcome = start(rank, world_size, cores)
    assert outcome == Completed(None)
    assert made.locate() == Completed(RankInfo(rank, "a node", "10.0.0.7", os.getpid(), start_time(os.getpid())))
    context = made._context
    assert context is not None and context.runtime == "runtime of a config"
    assert (context.group_id, context.rank, context.world_size) == ("group", rank, world_size)


def test_a_rank_that_cannot_start_answers_why(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def create(config: str) -> None:
        raise ConfigError("no such model")

    monkeypatch.setattr(worker, "create_runtime", create)
    made, outcome = start(0, 1, 1)
    assert isinstance(outcome, Failed) and str(outcome.error) == "no such model"
    assert made._context is None
