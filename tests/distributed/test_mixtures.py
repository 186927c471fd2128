"""Mixtures with routers of their own kinds train in every layout as on one rank, and continue in another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.test_checkpoint_layouts import check
from tests.distributed.test_native_layouts import Run, assert_same, run_layout
from tests.distributed.test_native_pipelines import STAGES_PER_RANK
from tests.support.checkpoint_layouts import Layout, load_in, native, save_in
from tests.support.matrix import sampled
from tests.support.moe import write_moe
from tests.support.native import micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool

LAYOUTS: Mapping[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp4": ({}, {}),
    "tp2 cp2 ep2": ({"tp": 2, "cp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
    # Of four ranks, two have a copy of each head of keys.
    "tp4": ({"tp": 4}, {}),
    "cp4 ep2": ({"cp": 4, "ep": 2}, {}),
    "ep2 etp2": ({"ep": 2, "etp": 2}, {}),
    "tp2 etp2": ({"tp": 2, "etp": 2}, {}),
    "pp2 zbv ep2": ({"pp": 2, "vpp": 2, "ep": 2}, {"pipeline_schedule": "zbv"}),
    "pp2 tp2": ({"pp": 2, "tp": 2}, {}),
    "pp2 cp2": ({"pp": 2, "cp": 2}, {"pipeline_schedule": "zb-h1"}),
}
SIZES: Mapping[str, Any] = {"num_hidden_layers": 4, "vocab_size": 131}
"""A vocabulary that tp does not divide."""
MODELS = ("glm4_moe", "gpt_oss", "minimax_m2")


class OnOneRank:
    """Models, and what one rank computes of each.

    Attributes:
        weights: how close weights are to those of one rank after the last step.
    """

    weights = 1e-5

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.known: dict[str, Run] = {}

    def path(self, name: str) -> Path:
        path = self.folder / name
        return path if path.exists() else write_moe(name, path, **SIZES)

    def check(self, name: str, world: int, layout: dict[str, int], settings: dict[str, Any]) -> None:
        """``world`` ranks compute the same as one."""
        if name not in self.known:
            self.known[name] = run_layout(self.ranks, 1, self.path(name), {}, {})
        assert_same(run_layout(self.ranks, world, self.path(name), layout, settings), self.known[name], self.weights)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> OnOneRank:
    return OnOneRank(ranks, tmp_path_factory.mktemp("models"))


@pytest.mark.shows(
    "runtime: GLM-4.5, gpt-oss, MiniMax-M2 with dp, tp, cp, ep, etp and pp trains as on one rank: losses, gradients to 1e-5"
)
@pytest.mark.parametrize(
    ("model", "layout"),
    sampled(
        [(model, layout) for model in MODELS for layout in LAYOUTS],
        *(("glm4_moe", "tp2 cp2 ep2"), ("gpt_oss", "pp2 zbv ep2"), ("minimax_m2", "tp2 cp2 ep2")),
    ),
)
def test_every_layout_trains_as_one_rank(one_rank: OnOneRank, model: str, layout: str) -> None:
    one_rank.check(model, 4, *LAYOUTS[layout])


@pytest.mark.long
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_trains_as_one_rank(one_rank: OnOneRank, model: str, schedule: str) -> None:
    one_rank.check(model, 2, {"pp": 2, "vpp": STAGES_PER_RANK[schedule]}, {"pipeline_schedule": schedule})


@pytest.mark.parametrize(
    ("model", "saver", "loader"),
    [
        pytest.param("minimax_m2", native(4, tp=2, ep=2), native(2, pp=2), marks=pytest.mark.long),
        ("gpt_oss", native(4, ep=2, etp=2), native(2, tp=2)),
        pytest.param("glm4_moe", native(2, pp=2), native(4, tp=2, cp=2, ep=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_mixture_continues_in_another_layout(
    ranks: RankPool, tmp_path: Path, model: str, saver: Layout, loader: Layout
) -> None:
    path = write_moe(model, tmp_path / "model")
    saved = save_in(ranks, path, tmp_path / "saved", saver)
    check(loader, saver, load_in(ranks, path, saved, tmp_path / "again", loader))


def rounded_job(model: str, layout: dict[str, int]) -> tuple[dict[str, Tensor], set[str], float]:
    """Exported biases of routers after a step in bfloat16, what is exported in float32, and the loss of the step."""
    with open_runtime(model, parallel=layout, param_dtype="bfloat16") as runtime:
        handle = runtime.build_model()
        loss = runtime.forward_backward(handle, micro_batches([[0, 1], [2, 3]]), token_loss).loss
        assert runtime.optimizer_step(handle).ok
        exported = {name: value.clone() for name, value in runtime.export_weights(handle, dtype=torch.bfloat16)}
        biases = {name: value for name, value in exported.items() if name.endswith("e_score_correction_bias")}
        return biases, {name for name, value in exported.items() if value.dtype == torch.float32}, loss


@pytest.mark.shows("model: biases of routers stay in float32, as they are, in models that are computed in bfloat16")
def test_biases_of_routers_stay_in_float32(ranks: RankPool, one_rank: OnOneRank) -> None:
    model = str(one_rank.path("minimax_m2"))
    with open_runtime(model) as runtime:
        stored = dict(runtime.export_weights(runtime.build_model(forward_only=True)))
    found = ranks.run(rounded_job, model, {"tp": 2, "ep": 2}, world_size=2)
    for biases, in_float32, loss in found:
        assert in_float32 == biases.keys() and len(biases) == 4
        assert all(torch.equal(value, stored[name]) for name, value in biases.items())
        assert loss == found[0][2]
