"""Multi-token prediction in layouts of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.distributed.test_native_layouts import Run, assert_same, train_job, whole
from tests.distributed.test_native_pipelines import STAGES_PER_RANK
from tests.support.drafting import write_drafting
from tests.support.layouts import layouts
from tests.support.native import full, open_runtime, train
from tests.support.rank_pool import RankPool

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYOUTS: Mapping[int, list[dict[str, int]]] = {2: [{"tp": 2}, {"cp": 2}, {"ep": 2}], 4: [{"tp": 2, "cp": 2, "ep": 2}]}


def job(
    model: str,
    layout: Mapping[str, int],
    mtp: str,
    schedule: str = "auto",
    family: str = "drafting_moe",
    recompute: str = "none",
) -> Run:
    """On ranks that know the family by the import of this module."""
    options = {
        "model": family,
        "model_cfg": {"mtp": mtp, "mtp_loss_weight": 0.3},
        "pipeline_schedule": schedule,
        "activation_checkpointing": recompute,
    }
    # Of gradients that are rounding Adam makes no whole steps then.
    return train_job(model, layout, options, {"eps": 1e-4})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A vocabulary that tp does not divide.
    return write_drafting(tmp_path_factory.mktemp("drafting") / "model", "drafting_moe", vocab_size=131, **EXPERTS)


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: Path) -> Run:
    return whole(ranks.run(job, str(model), {}, "joint", world_size=1))


@pytest.mark.shows("multi-token prediction: tp, cp, ep and dp train the layer, the model and the copies as one rank to 1e-5")
@pytest.mark.parametrize(("world", "layout"), layouts(LAYOUTS))
def test_layouts_train_as_one_rank(
    ranks: RankPool, model: Path, on_one_rank: Run, world: int, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(job, str(model), layout, "joint", world_size=world)), on_one_rank)


def test_computed_again_it_is_that_of_its_own_replica(ranks: RankPool, model: Path, on_one_rank: Run) -> None:
    """Two replicas of two tensor-parallel ranks: what a rank computes again is of its replica's tokens."""
    run = whole(ranks.run(job, str(model), {"tp": 2}, "joint", "auto", "drafting_moe", "full", world_size=4))
    assert_same(run, on_one_rank)


@pytest.mark.long
def test_detached_it_is_the_same_in_a_layout(ranks: RankPool, model: Path) -> None:
    expected = whole(ranks.run(job, str(model), {}, "detached", world_size=1))
    assert_same(whole(ranks.run(job, str(model), {"tp": 2, "cp": 2}, "detached", world_size=4)), expected)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def deep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers enough for stages; on the last one are copies of the embeddings, as its head or beside it."""
    folder = tmp_path_factory.mktemp("drafting") / "model"
    return write_drafting(folder, "drafting_moe", tied=request.param, num_hidden_layers=4, **EXPERTS)


@pytest.fixture(scope="module")
def deep_on_one_rank(ranks: RankPool, deep: Path) -> Run:
    return whole(ranks.run(job, str(deep), {}, "joint", world_size=1))


@pytest.mark.shows(
    "multi-token prediction: every pipeline schedule trains it as one rank to 1e-5, its copy of the embeddings too"
)
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_a_pipeline_trains_as_one_rank(ranks: RankPool, deep: Path, deep_on_one_rank: Run, schedule: str) -> None:
    layout = {"pp": 2, "vpp": STAGES_PER_RANK[schedule]}
    assert_same(whole(ranks.run(job, str(deep), layout, "joint", schedule, world_size=2)), deep_on_one_rank)


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=["dp2", "tp2", "cp2"])
def test_stages_are_laid_out_over_ranks_themselves(
    ranks: RankPool, deep: Path, deep_on_one_rank: Run, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(job, str(deep), {"pp": 2, **layout}, "joint", world_size=4)), deep_on_one_rank)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafting(tmp_path_factory.mktemp("drafting") / "model", "glm4_moe", vocab_size=131, num_hidden_layers=2)


@pytest.fixture(scope="module")
def glm_on_one_rank(ranks: RankPool, glm: Path) -> Run:
    return whole(ranks.run(job, str(glm), {}, "joint", "auto", "glm4_moe", world_size=1))


@pytest.mark.shows(
    "multi-token prediction: GLM-4.5's layer is trained on the last stage, and over tp and ep, as on one rank"
)
@pytest.mark.parametrize("layout", [{"pp": 2}, pytest.param({"tp": 2, "ep": 2}, marks=pytest.mark.long)], ids=["pp2", "tp2"])
def test_the_layer_of_glm_is_laid_out_as_the_others(
    ranks: RankPool, glm: Path, glm_on_one_rank: Run, layout: dict[str, int]
) -> None:
    assert_same(whole(ranks.run(job, str(glm), layout, "joint", "auto", "glm4_moe", world_size=2)), glm_on_one_rank)


def copies_job(model: str, schedule: str, vpp: int) -> tuple[str, ...]:
    """Names of the copies on this rank, after two steps of detached training, which leave each as its original."""
    options = {"model": "drafting_moe", "model_cfg": {"mtp": "detached"}, "pipeline_schedule": schedule}
    with open_runtime(model, parallel={"pp": 2, "vpp": vpp}, **options) as runtime:
        handle = runtime.build_model()
        train(runtime, handle, 2)
        exported = {name: tensor.clone() for name, tensor in runtime.export_weights(handle)}
        held = [name for name in handle.stage_copies if name in handle.parameters]
        for name in held:
            assert torch.equal(full(handle.parameters[name]), exported["model.embed_tokens.weight"]), name
        return tuple(held)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_detached_its_copy_of_the_embeddings_follows_them(ranks: RankPool, deep: Path, schedule: str) -> None:
    """Nothing of the layer's loss flows to the copy, which moves with its original all the same."""
    held = ranks.run(copies_job, str(deep), schedule, STAGES_PER_RANK[schedule], world_size=2)
    assert sum(map(len, held)) == 1
