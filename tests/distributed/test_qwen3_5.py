"""Qwen3.5, dense and as a mixture, and Qwen3-Next train in every layout as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_backend.contracts import ConfigError, WeightShard
from tests.distributed.test_native_layouts import SPLIT, Run, assert_same, run_layout
from tests.distributed.test_native_pipelines import STAGES_PER_RANK
from tests.support.layouts import layouts
from tests.support.native import (
    assert_near,
    deal,
    gradients,
    micro_batches,
    open_in_float64,
    open_runtime,
    token_loss,
)
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.rank_pool import RankPool

SIZES: dict[str, Any] = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
# What the first tokens of a sequence read from states may be near 0: a norm with a small eps would magnify its rounding.
SMALL: dict[str, Any] = {**SIZES, "rms_norm_eps": 1e-3}
EPS = 1e-4
"""Of gradients that are rounding Adam makes no whole steps then."""

DENSE = {2: [{"tp": 2}, {"cp": 2}], 4: [{}, {"tp": 2, "cp": 2}, {"cp": 4}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}]}
MIXTURE = {
    2: [{"tp": 2, "ep": 2}, {"cp": 2, "ep": 2}],
    4: [{"ep": 4}, {"tp": 2, "cp": 2, "ep": 2}, {"ep": 2, "etp": 2}, {"pp": 2, "ep": 2}],
}
NEXT = {2: [{"tp": 2}], 4: [{"tp": 2, "cp": 2, "ep": 4}]}

# With the eps of released models.
EXACT_MODELS: dict[str, Callable[[Path], Path]] = {
    "dense": partial(write_qwen3_5, **SIZES),
    "odd heads": partial(write_qwen3_5, **SIZES, linear_num_value_heads=6, linear_conv_kernel_dim=2),
    "mixture": partial(write_qwen3_5, moe=True, **SIZES),
    "next": partial(write_qwen3_next, **SIZES),
}
EXACT: dict[str, list[dict[str, int]]] = {
    "dense": [{"tp": 2, "cp": 2}, {"pp": 2, "tp": 2}],
    "odd heads": [{"tp": 2}, {"cp": 4}],
    "mixture": [{"tp": 2, "cp": 2, "ep": 2}],
    "next": [{"tp": 2, "cp": 2, "ep": 4}],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("dense"), **SMALL)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough layers for two stages on each of four ranks; the embeddings are at both ends."""
    return write_qwen3_5(tmp_path_factory.mktemp("deep"), layers=8, **SMALL)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("mixture"), moe=True, **SMALL)


@pytest.fixture(scope="module")
def next_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_next(tmp_path_factory.mktemp("next"), **SMALL)


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool) -> dict[Path, Run]:
    return {}


def check(ranks: RankPool, known: dict[Path, Run], model: Path, world: int, layout: dict[str, int], **settings: Any) -> None:
    if model not in known:
        known[model] = run_layout(ranks, 1, model, {}, {}, eps=EPS)
    assert_same(run_layout(ranks, world, model, layout, settings, eps=EPS), known[model])


@pytest.mark.shows("runtime: Qwen3.5 with dp, tp, cp, ep, etp and pp matches one rank's losses and gradients to 1e-5")
@pytest.mark.parametrize(("world", "layout"), layouts(DENSE))
def test_dense_layouts_train_as_one_rank(
    ranks: RankPool, on_one_rank: dict[Path, Run], dense: Path, world: int, layout: dict[str, int]
) -> None:
    check(ranks, on_one_rank, dense, world, layout)


@pytest.mark.parametrize(("world", "layout"), layouts(MIXTURE))
def test_mixtures_train_as_on_one_rank(
    ranks: RankPool, on_one_rank: dict[Path, Run], mixture: Path, world: int, layout: dict[str, int]
) -> None:
    check(ranks, on_one_rank, mixture, world, layout)


@pytest.mark.parametrize(("world", "layout"), layouts(NEXT))
def test_interleaved_projections_train_as_on_one_rank(
    ranks: RankPool, on_one_rank: dict[Path, Run], next_model: Path, world: int, layout: dict[str, int]
) -> None:
    check(ranks, on_one_rank, next_model, world, layout)


@pytest.mark.shows("runtime: Qwen3.5 with all six pipeline schedules matches one rank's losses and gradients to 1e-5")
@pytest.mark.parametrize(("schedule", "pp"), [*((name, 2) for name in STAGES_PER_RANK), ("zbv", 4)])
def test_every_schedule_trains_as_one_rank(
    ranks: RankPool, on_one_rank: dict[Path, Run], deep: Path, schedule: str, pp: int
) -> None:
    layout = {"pp": pp, "vpp": STAGES_PER_RANK[schedule]}
    check(ranks, on_one_rank, deep, pp, layout, pipeline_schedule=schedule)


@pytest.mark.parametrize("layout", [{"tp": 2, "cp": 2}, {"pp": 2}], ids=str)
def test_recomputed_layers_change_nothing(
    ranks: RankPool, on_one_rank: dict[Path, Run], dense: Path, layout: dict[str, int]
) -> None:
    check(ranks, on_one_rank, dense, 4, layout, activation_checkpointing="full")


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_bfloat16_parameters_give_gradients_near_the_exact_ones(
    ranks: RankPool, on_one_rank: dict[Path, Run], dense: Path, layout: dict[str, int]
) -> None:
    if dense not in on_one_rank:
        on_one_rank[dense] = run_layout(ranks, 1, dense, {}, {}, eps=EPS)
    run = run_layout(ranks, 4, dense, layout, {"param_dtype": "bfloat16"})
    assert_near(run.gradients, on_one_rank[dense].gradients, 0.1, dtype=torch.float32)


def exact_job(model: str, layout: dict[str, int]) -> dict[str, Tensor]:
    """Whole float64 gradients of this rank's stages."""
    with open_in_float64(model, parallel=layout) as runtime:
        handle = runtime.build_model()
        dp_rank, dp_size = handle.data_parallel_rank, handle.data_parallel_size
        batches = micro_batches(deal(SPLIT, dp_size)[dp_rank], dp_size=dp_size, temperature=0.7)
        runtime.forward_backward(handle, batches, token_loss)
        return gradients(handle)


@pytest.mark.shows("runtime: gradients of Qwen3.5 with tp, cp, ep and pp equal one rank's to 1e-10 in float64")
@pytest.mark.parametrize(("name", "layouts"), EXACT.items(), ids=list(EXACT))
def test_what_float32_leaves_of_a_difference_is_rounding(
    ranks: RankPool, tmp_path: Path, name: str, layouts: list[dict[str, int]]
) -> None:
    model = EXACT_MODELS[name](tmp_path / "model")
    (expected,) = ranks.run(exact_job, str(model), {}, world_size=1)
    for layout in layouts:
        parts = ranks.run(exact_job, str(model), layout, world_size=4)
        found = {key: value for part in parts for key, value in part.items()}
        # The last stage has a copy of tied embeddings.
        assert_near({key: found[key] for key in expected}, expected, 1e-10, dtype=torch.float64)


def shards_job(model: str, layout: dict[str, int]) -> list[WeightShard]:
    with open_runtime(model, parallel=layout) as runtime:
        handle = runtime.build_model(forward_only=True)
        return [shard._replace(tensor=shard.tensor.clone()) for shard in runtime.export_shards(handle)]


@pytest.mark.parametrize("name", ["mixture", "next_model"])
def test_shards_of_tensor_parallel_ranks_are_the_whole_weights(
    ranks: RankPool, name: str, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(name)
    stored = {key: tensor for file in model.glob("*.safetensors") for key, tensor in load_file(file).items()}
    found = {key: torch.full_like(tensor, torch.nan) for key, tensor in stored.items()}
    for shards in ranks.run(shards_job, str(model), {"tp": 2, "ep": 2}, world_size=4):
        for shard in shards:
            if shard.tensor.numel():
                places = zip(shard.offset, shard.tensor.shape, strict=True)
                found[shard.name][tuple(slice(start, start + size) for start, size in places)] = shard.tensor
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in stored.items())


def refused_job(model: str, layout: dict[str, int]) -> str:
    with pytest.raises(ConfigError) as refused, open_runtime(model, parallel=layout) as runtime:
        runtime.build_model()
    return str(refused.value)


def test_more_ranks_than_key_heads_are_refused_with_arithmetic(ranks: RankPool, dense: Path) -> None:
    for message in ranks.run(refused_job, str(dense), {"tp": 4}, world_size=4):
        assert "ParallelConfig.tp=4: does not divide linear_num_key_heads=2 (2 / 4 = 0.50); use 2" in message
