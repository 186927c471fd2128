"""Ranks that see different data draw different random numbers, those of one replica the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.bridge_runs import open_bridge
from tests.support.native import open_runtime
from tests.support.rank_pool import RankPool


def draw_job(model: str, backend: str, layout: dict[str, int]) -> list[float]:
    with open_bridge(model, layout) if backend == "bridge" else open_runtime(model, parallel=layout):
        return torch.rand(4).tolist()


@pytest.mark.parametrize("backend", ["native", "bridge"])
def test_seeds_differ_by_data_parallel_rank_alone(ranks: RankPool, tied_model: Path, backend: str) -> None:
    data_parallel = ranks.run(draw_job, str(tied_model), backend, {})
    assert data_parallel[0] != data_parallel[1]
    tensor_parallel = ranks.run(draw_job, str(tied_model), backend, {"tp": 2})
    assert tensor_parallel == [data_parallel[0]] * 2
