"""Compiled layers in several layouts: every one trains as it does without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compiling import counted_graphs
from tests.support.moe import write_moe
from tests.support.native import assert_near, deal, gradients, micro_batches, open_in_float64, token_loss
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]


def train_job(model: str, settings: Mapping[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of this rank, its gradients of the first step, and how many graphs its layers were compiled into."""
    with counted_graphs() as graphs, open_in_float64(model, **settings) as runtime:
        handle = runtime.build_model()
        size = handle.data_parallel_size
        mine = deal(SPLIT, size)[handle.data_parallel_rank]
        losses, first = [], dict[str, Tensor]()
        for step in range(2):
            runtime.zero_grad(handle)
            losses.append(runtime.forward_backward(handle, micro_batches(mine, dp_size=size, seed=step), token_loss).loss)
            first = first or gradients(handle)
            assert runtime.optimizer_step(handle).ok
    return losses, first, len(graphs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe, dense layers between", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"activation_checkpointing": "full"}, marks=pytest.mark.long),
        pytest.param({"parallel": {"pp": 2}}, marks=pytest.mark.long),
        {"parallel": {"tp": 2}},
        {"parallel": {"cp": 2, "ep": 2}},
    ],
    ids=["dp2", "pp2", "tp2", "cp2-ep2"],
)
def test_compiled_layers_train_as_others_do(ranks: RankPool, model: Path, settings: dict[str, Any]) -> None:
    compiled = ranks.run(train_job, str(model), {**settings, "compile": True}, world_size=2)
    expected = ranks.run(train_job, str(model), settings, world_size=2)
    for (losses, grads, graphs), (expected_losses, expected_grads, _) in zip(compiled, expected, strict=True):
        assert graphs > 0
        torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0.0)
        assert_near(grads, expected_grads, 1e-10)
