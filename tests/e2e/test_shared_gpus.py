"""Ranks and engines on the same GPUs, by Ray's count of them; no GPU is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.placement import reserve, reserve_bundles, share_cluster

ray.init(num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)


@ray.remote
class Member:
    def gpu(self) -> list:
        return [str(number) for number in ray.get_gpu_ids()]


def gpus(strategies, share):
    members = [Member.options(num_cpus=1, num_gpus=share, scheduling_strategy=each).remote() for each in strategies]
    return members, ray.get([member.gpu.remote() for member in members])


share = share_cluster(4, 4, colocate=True)
one, rest = share.gpus, share.gpus_per_engine
placed = reserve(num_ranks=4, cores_per_rank=1, gpus_per_rank=one, strategy="pack", name="policy", timeout=30.0)
ranks, of_ranks = gpus([placed.scheduling_strategy(rank) for rank in range(4)], one)
group = reserve_bundles("engines", "engine", {"CPU": 1, "GPU": rest}, 4, "pack", 30.0)
engines, of_engines = gpus([PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=n) for n in range(4)], rest)
assert sorted(of_ranks) == sorted(of_engines) == [["0"], ["1"], ["2"], ["3"]], (of_ranks, of_engines)
ray.shutdown()
"""


@pytest.mark.long
@pytest.mark.shows("actors: N ranks and N engines share N GPUs, one of each on every GPU, as Ray counts them")
def test_ranks_and_engines_share_gpus_one_of_each_on_every_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    environment.pop("RAY_ADDRESS", None)
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
