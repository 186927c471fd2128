"""Losses of routers through the runtime: the gradients of one rank in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_native_layouts import Run, assert_same, run_layout
from tests.support.layouts import layouts
from tests.support.moe import write_moe
from tests.support.native import relative_difference
from tests.support.rank_pool import RankPool

LAYOUTS = {2: [{}, {"ep": 2}, {"tp": 2}, {"cp": 2}], 4: [{"tp": 2, "cp": 2, "ep": 2}, {"cp": 2, "ep": 4}]}
PIPELINES = {
    2: [("auto", {"pp": 2}), ("zbv", {"pp": 2, "vpp": 2}), ("interleaved-1f1b", {"pp": 2, "vpp": 2})],
    4: [("zbv", {"pp": 2, "vpp": 2, "tp": 2}), ("auto", {"pp": 2, "ep": 2})],
}
LOSSES: dict[str, Any] = {
    "model": "qwen3_moe",
    "model_cfg": {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.2, "router_sequence_loss_coef": 0.3},
}
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages."""
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("deep"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def deep_on_one_rank(deep: Path, ranks: RankPool) -> Run:
    return run_layout(ranks, 1, deep, {}, LOSSES)


@pytest.fixture(scope="module")
def on_one_rank(mixture: Path, ranks: RankPool) -> Run:
    run = run_layout(ranks, 1, mixture, {}, LOSSES)
    without = run_layout(ranks, 1, mixture, {}, {})
    assert relative_difference(run.gradients[ROUTER], without.gradients[ROUTER]) > 0.1
    return run


@pytest.mark.shows("runtime: router losses with native tp, cp, ep and dp on 2 and 4 ranks match one rank's gradients")
@pytest.mark.parametrize(("world", "layout"), layouts(LAYOUTS))
def test_router_losses_do_not_depend_on_the_layout(
    ranks: RankPool, mixture: Path, on_one_rank: Run, world: int, layout: dict[str, int]
) -> None:
    assert_same(run_layout(ranks, world, mixture, layout, LOSSES), on_one_rank)


@pytest.mark.shows("runtime: router losses in native pipelines, looped and V-shaped, match one rank's gradients")
@pytest.mark.parametrize(
    ("world", "schedule", "layout"),
    [(world, schedule, layout) for world, found in PIPELINES.items() for schedule, layout in found],
    ids=str,
)
def test_router_losses_do_not_depend_on_the_pipeline(
    ranks: RankPool, deep: Path, deep_on_one_rank: Run, world: int, schedule: str, layout: dict[str, int]
) -> None:
    settings = {**LOSSES, "pipeline_schedule": schedule}
    assert_same(run_layout(ranks, world, deep, layout, settings), deep_on_one_rank)
