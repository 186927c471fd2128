"""Gradients do not depend on how sequences are laid out over ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.native import (
    assert_near,
    deal,
    gradients_job,
)
from tests.support.rank_pool import RankPool

WHOLE = [[0, 1, 2, 3, 4, 5, 6, 7]]
SPLITS = {
    "two sequences each": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "one sequence each": [[7], [6], [5], [4], [3], [2], [1], [0]],
    "uneven": [[5, 3, 7], [4], [0, 1], [2, 6]],
}


@pytest.fixture(scope="module", params=["tied_model", "untied_model"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def one_rank(model: Path) -> dict[str, Tensor]:
    return gradients_job(str(model), [WHOLE], {})


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert_near(result, expected, tolerance, dtype=torch.float32)


@pytest.mark.shows("runtime: gradients with 2 and 4 ranks and any micro-batch split equal one rank's to 1e-5")
@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_split_over_ranks_and_micro_batches_gives_the_gradients_of_one_rank(
    ranks: RankPool, model: Path, one_rank: dict[str, Tensor], split: list[list[int]], world_size: int
) -> None:
    results = ranks.run(gradients_job, str(model), deal(split, world_size), {}, world_size=world_size)
    assert_same(results[0], one_rank)


@pytest.mark.shows("runtime: activation checkpointing, resharding and when gradients are reduced change no gradient")
@pytest.mark.parametrize(
    "settings",
    [
        {"reshard_after_forward": False},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "reshard_after_forward": False},
        {"log_prob_chunk_tokens": 7},
        {"reduce_gradients": "per_micro_batch"},
        {"reduce_gradients": "per_micro_batch", "reshard_after_forward": False},
    ],
    ids=str,
)
def test_options_that_trade_memory_for_time_do_not_change_gradients(
    ranks: RankPool, model: Path, one_rank: dict[str, Tensor], settings: dict[str, Any]
) -> None:
    split = deal(SPLITS["two sequences each"], 2)
    assert_same(ranks.run(gradients_job, str(model), split, settings, world_size=2)[0], one_rank)


@pytest.mark.parametrize(("world_size", "reduction"), [(1, "once"), (2, "once"), (1, "per_micro_batch")])
def test_bfloat16_parameters_give_float32_gradients_near_the_exact_ones(
    ranks: RankPool, model: Path, one_rank: dict[str, Tensor], world_size: int, reduction: str
) -> None:
    split = deal(SPLITS["two sequences each"], world_size)
    settings = {"param_dtype": "bfloat16", "reduce_gradients": reduction}
    result = ranks.run(gradients_job, str(model), split, settings, world_size=world_size)[0]
    assert_same(result, one_rank, tolerance=0.05)
