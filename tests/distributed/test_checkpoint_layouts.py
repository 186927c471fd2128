"""A checkpoint of any layout and runtime goes on in any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bridge_state import write_tiny_mixture
from tests.support.checkpoint_layouts import DENSE, MIXTURE, Layout, continue_in
from tests.support.models import write_tiny_qwen3
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("dense"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mixture(tmp_path_factory.mktemp("mixture"))


def check(ranks: RankPool, model: Path, folder: Path, saver: Layout, loaders: list[Layout]) -> None:
    for loader, difference in continue_in(ranks, model, folder, saver, loaders).items():
        if loader == saver:
            assert difference["loss"] == 0, loader
        else:
            assert difference["loss"] < 1e-6, f"{loader}: {difference}"


@pytest.mark.shows(
    "checkpoints: dp, tp, pp, vpp, cp, the world size and the runtime may change; moments are equal in every bit"
)
@pytest.mark.parametrize("saver", list(DENSE), ids=str)
def test_a_dense_model_goes_on_in_another_layout(ranks: RankPool, dense: Path, tmp_path: Path, saver: Layout) -> None:
    check(ranks, dense, tmp_path, saver, DENSE[saver])


@pytest.mark.shows("checkpoints: a mixture goes on with its experts laid out anew, on either runtime")
@pytest.mark.parametrize("saver", list(MIXTURE), ids=str)
def test_a_mixture_goes_on_in_another_layout(ranks: RankPool, mixture: Path, tmp_path: Path, saver: Layout) -> None:
    check(ranks, mixture, tmp_path, saver, MIXTURE[saver])
