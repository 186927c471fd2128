"""What listens while a run is on one machine: nothing that another machine can reach."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from actors import TrainGroup
from actors.rollout.config import RolloutConfig
from actors.rollout.group import RolloutGroup
from actors.sync.push import WeightSync
from rl_backend.contracts import NativeConfig, RuntimeConfig
from tests.support.listening import family, listening_sockets


@pytest.mark.shows("security: ranks, engines, weight transfer and Ray on one machine listen on the loopback address alone")
def test_a_run_on_one_machine_listens_on_the_loopback_address_alone(ray_cluster: None, tied_model: Path) -> None:
    config = RuntimeConfig(hf_path=str(tied_model), max_tokens_per_micro_batch=64, backend_cfg=NativeConfig(device="cpu"))
    engines = RolloutConfig(
        model_path=str(tied_model),
        device="cpu",
        dtype="float32",
        max_model_len=128,
        max_num_batched_tokens=128,
        kv_cache_gib=0.25,
    )
    with TrainGroup(config, num_ranks=2) as train, RolloutGroup(engines) as rollout:
        with WeightSync(train, rollout, train.build_model(), transport="gloo") as sync:
            sync.push()
            sockets = listening_sockets(family(psutil.Process()))
        ranks = {rank.pid for rank in train.ranks}
        engine = rollout.infos[0].pid
    holders = {int(socket.process.split()[0]) for socket in sockets}
    # Each rank listens for its peers, each engine for the weights, and Ray's own processes for each other.
    assert ranks <= holders
    assert engine in holders
    names = {socket.process.split()[1] for socket in sockets}
    assert {"gcs_server", "raylet"} <= names
    assert [socket for socket in sockets if not socket.out_of_reach] == []
