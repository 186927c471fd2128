"""Qwen3.5 through Megatron-Bridge: every layout trains as one rank does, and so do checkpoints that change it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.checkpoint.hf_export import TrainingWeights
from rl_backend.contracts import OptimizerConfig, UnsupportedError
from tests.support.bridge_runs import Run, assert_same, open_bridge, train_job, whole
from tests.support.bridge_state import exported, optimizer_shards, stored_weights, train_bridge
from tests.support.layouts import layouts
from tests.support.matrix import sampled
from tests.support.native import assert_equal_tensors, assert_near
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.rank_pool import RankPool
from tests.support.routes import routes_job, sorted_routes

STEPS = 2
# The first tokens of a sequence may read little from their states, and a norm with a small eps magnifies its rounding. With
# keys of 16 features and an eps of 1e-6 the mixture's gradient of A_log is 8e-5 from float64's on one rank, 2e-5 with tp=2.
SMALL: dict[str, Any] = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 24, "rms_norm_eps": 1e-3}
SETTINGS = {"optimizer": OptimizerConfig(lr=1e-3, eps=1e-4)}
"""Of gradients that are rounding Adam makes no whole steps then."""
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

DENSE = {2: [{}, {"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}], 4: [{"tp": 2, "pp": 2}]}
MIXTURE = {2: [{}, {"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"pp": 2}], 4: [{"ep": 2, "pp": 2}]}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_qwen3_5(tmp_path_factory.mktemp("dense"), **SMALL))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_qwen3_5(tmp_path_factory.mktemp("mixture"), moe=True, **SMALL))


@pytest.fixture(scope="module")
def dense_on_one_rank(dense: str, ranks: RankPool) -> Run:
    return whole(ranks.run(train_job, dense, {}, STEPS, SETTINGS, world_size=1))


@pytest.fixture(scope="module")
def mixture_on_one_rank(mixture: str, ranks: RankPool) -> Run:
    return whole(ranks.run(train_job, mixture, {}, STEPS, SETTINGS, world_size=1))


@pytest.mark.shows("bridge: Qwen3.5 trains alike with dp, tp and sp, pp, vpp on 2 and 4 ranks")
@pytest.mark.parametrize(("world_size", "layout"), layouts(DENSE, 2))
def test_a_dense_model_trains_the_same_in_every_layout(
    ranks: RankPool, dense: str, dense_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(train_job, dense, layout, STEPS, SETTINGS, world_size=world_size)), dense_on_one_rank)


@pytest.mark.shows("bridge: Qwen3.5's mixture trains alike with ep, tp, pp on 2 and 4 ranks")
@pytest.mark.parametrize(("world_size", "layout"), layouts(MIXTURE, 2))
def test_a_mixture_of_experts_trains_the_same_in_every_layout(
    ranks: RankPool, mixture: str, mixture_on_one_rank: Run, world_size: int, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(train_job, mixture, layout, STEPS, SETTINGS, world_size=world_size)), mixture_on_one_rank)


@pytest.mark.long
def test_layers_that_are_computed_again_give_the_same(ranks: RankPool, mixture: str, mixture_on_one_rank: Run) -> None:
    assert_same(whole(ranks.run(train_job, mixture, {"tp": 2}, STEPS, SETTINGS | RECOMPUTED)), mixture_on_one_rank)


def resume_job(model: str, path: str, settings: Mapping[str, Any]) -> None:
    """Trains on from a checkpoint, in another handle."""
    with open_bridge(model, {"tp": 2}, **settings) as runtime:
        saved, resumed = runtime.build_model(name="saved"), runtime.build_model(name="resumed")
        train_bridge(runtime, saved, 2)
        runtime.save_checkpoint(saved, path)
        norms = train_bridge(runtime, saved, 2, seed=10)
        runtime.load_checkpoint(resumed, path)
        assert train_bridge(runtime, resumed, 2, seed=10) == norms
        assert_equal_tensors(exported(runtime, resumed), exported(runtime, saved))
        assert_equal_tensors(optimizer_shards(resumed), optimizer_shards(saved))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.long
def test_a_run_resumes_bit_for_bit(ranks: RankPool, mixture: str, tmp_path: Path, dtype: str) -> None:
    ranks.run(resume_job, mixture, str(tmp_path / "saved"), {"param_dtype": dtype})


def save_job(model: str, path: str) -> dict[str, Tensor]:
    with open_bridge(model, {"tp": 2}) as runtime:
        handle = runtime.build_model()
        train_bridge(runtime, handle, 2)
        runtime.save_checkpoint(handle, path)
        return exported(runtime, handle)


def load_job(model: str, path: str) -> dict[str, Tensor]:
    with open_bridge(model, {"pp": 2}) as runtime:
        handle = runtime.build_model()
        runtime.load_checkpoint(handle, path)
        return exported(runtime, handle)


@pytest.mark.parametrize("family", sampled(["qwen3_5", "qwen3_next"], "qwen3_5"))
def test_checkpoints_have_hugging_faces_rows(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """Of gated attention and of the fused projections of DeltaNet: another layout reads them, and no name is private."""
    write = write_qwen3_5 if family == "qwen3_5" else write_qwen3_next
    model, path = str(write(tmp_path / "model", **SMALL)), str(tmp_path / "saved")
    saved, _ = ranks.run(save_job, model, path)
    loaded, _ = ranks.run(load_job, model, path)
    assert_equal_tensors(loaded, saved)
    weights = TrainingWeights(path)
    assert_equal_tensors({name: tensor.clone() for name, tensor in weights.tensors(torch.float32)}, saved)


def float32_job(model: str, layout: Mapping[str, int]) -> dict[str, Tensor]:
    with open_bridge(model, layout, param_dtype="bfloat16") as runtime:
        handle = runtime.build_model()
        loaded = exported(runtime, handle)
        train_bridge(runtime, handle, 1)
        trained = exported(runtime, handle)
        changed = [name for name in loaded if not torch.equal(loaded[name], trained[name])]
        assert {name for name in loaded if name.endswith("A_log")} <= set(changed)
        return loaded


@pytest.mark.shows("bridge: Qwen3.5's decay stays in float32 beside bfloat16 weights, and is trained")
@pytest.mark.parametrize("layout", [{}, {"tp": 2}], ids=str)
def test_the_decay_stays_in_float32(ranks: RankPool, dense: str, layout: dict[str, int]) -> None:
    loaded, _ = ranks.run(float32_job, dense, layout)
    stored = stored_weights(dense)
    for name, weight in loaded.items():
        assert weight.dtype == (torch.float32 if name.endswith("A_log") else torch.bfloat16), name
        assert torch.equal(weight, stored[name].to(weight.dtype)), name


@pytest.mark.shows("bridge: routes of Qwen3.5's mixture recorded on one rank replay with tp, ep and pp")
@pytest.mark.long
def test_every_layout_replays_the_routes_of_one_rank(ranks: RankPool, mixture: str, tmp_path: Path) -> None:
    models, file = (mixture, str(write_qwen3_5(tmp_path / "other", moe=True, seed=1, **SMALL))), str(tmp_path / "routes.pt")
    (alone,) = ranks.run(routes_job, "bridge", models, {}, {}, [file], file, world_size=1)
    assert not torch.equal(sorted_routes(alone.recorded), sorted_routes(alone.other))
    expected = alone.replays[file]
    for layout in ({"tp": 2, "ep": 2}, {"pp": 2}):
        for run in ranks.run(routes_job, "bridge", models, layout, {}, [file]):
            assert run.same
            assert torch.equal(sorted_routes(run.recorded), sorted_routes(alone.recorded))
            assert run.replays[file].loss == pytest.approx(expected.loss, rel=1e-5)
            assert_near(run.replays[file].gradients, expected.gradients)


def tenants_job(model: str) -> str:
    with open_bridge(model) as runtime, pytest.raises(UnsupportedError) as refused:
        runtime.build_model(trainable=False)
    return str(refused.value)


def test_tenants_are_refused_by_name(ranks: RankPool, dense: str) -> None:
    (message,) = ranks.run(tenants_job, dense, world_size=1)
    assert "layers of gated DeltaNet" in message
    assert "backend='native'" in message
