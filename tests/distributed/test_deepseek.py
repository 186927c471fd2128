"""DeepSeek-V3 and its kin train in every layout as on one rank, and continue in another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_checkpoint_layouts import check
from tests.distributed.test_mixtures import OnOneRank
from tests.distributed.test_native_pipelines import STAGES_PER_RANK
from tests.support.checkpoint_layouts import Layout, load_in, native, save_in
from tests.support.deepseek import write_latent
from tests.support.rank_pool import RankPool

ODD = "deepseek_v3, YaRN, one latent, values wider than keys"
LAYOUTS: Mapping[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp2 cp2 ep2": ("deepseek_v3", {"tp": 2, "cp": 2, "ep": 2}, {"activation_checkpointing": "full"}),
    "pp2 zbv ep2": ("deepseek_v3", {"pp": 2, "vpp": 2, "ep": 2}, {"pipeline_schedule": "zbv"}),
    "dp4": ("kimi_k2", {}, {}),
    "tp4": ("glm4_moe_lite", {"tp": 4}, {}),
    # Heads that only cp does not have to share out.
    "cp4 ep4": (ODD, {"cp": 4, "ep": 4}, {}),
    "ep2 etp2": ("deepseek_v3", {"ep": 2, "etp": 2}, {}),
    "tp2 etp2": ("deepseek_v3, biases, half-split, tied", {"tp": 2, "etp": 2}, {}),
    "pp2 tp2": ("deepseek_v3, biases, half-split, tied", {"pp": 2, "tp": 2}, {}),
    "pp2 cp2": (ODD, {"pp": 2, "cp": 2}, {"pipeline_schedule": "zb-h1"}),
}
QUICK = ("tp2 cp2 ep2", "pp2 zbv ep2")
SIZES: Mapping[str, Any] = {"num_hidden_layers": 4, "vocab_size": 131}
"""A vocabulary that tp does not divide."""


class LatentOnOneRank(OnOneRank):
    # Adam moves a weight whose gradient is rounding alone by as much as any other, this way or that.
    weights = 3e-5

    def path(self, name: str) -> Path:
        path = self.folder / name
        return path if path.exists() else write_latent(name, path, **SIZES)


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> LatentOnOneRank:
    return LatentOnOneRank(ranks, tmp_path_factory.mktemp("models"))


@pytest.mark.shows(
    "runtime: DeepSeek-V3 and its kin with dp, tp, cp, ep, etp and pp train as on one rank, gradients to 1e-5"
)
@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_every_layout_trains_as_one_rank(one_rank: LatentOnOneRank, layout: str) -> None:
    model, parallel, settings = LAYOUTS[layout]
    one_rank.check(model, 4, parallel, settings)


@pytest.mark.long
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_every_schedule_trains_as_one_rank(one_rank: LatentOnOneRank, schedule: str) -> None:
    one_rank.check("deepseek_v3", 2, {"pp": 2, "vpp": STAGES_PER_RANK[schedule]}, {"pipeline_schedule": schedule})


@pytest.mark.parametrize(("saver", "loader"), [(native(4, tp=2, cp=2, ep=2), native(2, pp=2))], ids=str)
@pytest.mark.long
def test_a_model_continues_in_another_layout(ranks: RankPool, tmp_path: Path, saver: Layout, loader: Layout) -> None:
    path = write_latent("deepseek_v3", tmp_path / "model")
    saved = save_in(ranks, path, tmp_path / "saved", saver)
    check(loader, saver, load_in(ranks, path, saved, tmp_path / "again", loader))
