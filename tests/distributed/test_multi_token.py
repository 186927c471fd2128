"""Multi-token prediction in layouts of several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rl_backend.contracts import ConfigError
from tests.distributed.test_native_layouts import Run, assert_same, train_job, whole
from tests.support.drafting import write_drafting
from tests.support.layouts import layouts
from tests.support.native import open_runtime
from tests.support.rank_pool import RankPool

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYOUTS: Mapping[int, list[dict[str, int]]] = {2: [{"tp": 2}, {"cp": 2}, {"ep": 2}], 4: [{"tp": 2, "cp": 2, "ep": 2}]}


def job(model: str, layout: Mapping[str, int], mtp: str) -> Run:
    """On ranks that know the family by the import of this module."""
    options = {"model": "drafting_moe", "model_cfg": {"mtp": mtp, "mtp_loss_weight": 0.3}}
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


def test_detached_it_is_the_same_in_a_layout(ranks: RankPool, model: Path) -> None:
    expected = whole(ranks.run(job, str(model), {}, "detached", world_size=1))
    assert_same(whole(ranks.run(job, str(model), {"tp": 2, "cp": 2}, "detached", world_size=4)), expected)


def refusal_job(model: str) -> str:
    with (
        open_runtime(model, model="drafting_moe", model_cfg={"mtp": "joint"}, parallel={"pp": 2}) as runtime,
        pytest.raises(ConfigError) as refused,
    ):
        runtime.build_model()
    return str(refused.value)


def test_a_pipeline_is_refused_by_name(ranks: RankPool, model: Path) -> None:
    for message in ranks.run(refusal_job, str(model), world_size=2):
        assert "ParallelConfig.pp=2" in message
        assert "mtp='keep'" in message
