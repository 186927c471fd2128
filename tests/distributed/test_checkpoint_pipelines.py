"""Checkpoints of any layout loaded into several stages per rank, in a loop and in a V, and from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_checkpoint_layouts import check
from tests.support.checkpoint_layouts import Layout, bridge, continue_in, native
from tests.support.models import write_tiny_qwen3
from tests.support.moe import write_moe
from tests.support.rank_pool import RankPool

V, LOOP, MEGATRON = (
    native(2, "zbv", pp=2, vpp=2),
    native(2, "interleaved-1f1b", pp=2, vpp=2),
    bridge(2, pp=2, vpp=2),
)
DENSE: dict[Layout, list[Layout]] = {
    native(2): [V, LOOP, MEGATRON],
    V: [V, native(2, "dualpipev", pp=2, vpp=2), native(4, "zbv", pp=2, vpp=2), MEGATRON],
    LOOP: [V, LOOP],
    MEGATRON: [V, MEGATRON, native(1)],
}
MIXTURE: dict[Layout, list[Layout]] = {
    native(2, ep=2): [V, native(4, "zbv", pp=2, vpp=2, ep=2), MEGATRON],
    MEGATRON: [V, MEGATRON, native(2, ep=2)],
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, for four stages; in a V a tied embedding and its head are on one rank, in a loop on two."""
    tied = request.param == "tied"
    return write_tiny_qwen3(tmp_path_factory.mktemp("dense"), num_hidden_layers=4, tie_word_embeddings=tied)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=4)


@pytest.mark.long
@pytest.mark.shows(
    "checkpoints: any layout continues with several stages per rank (looped, V-shaped, the bridge's), and back"
)
@pytest.mark.parametrize("saver", list(DENSE), ids=str)
def test_a_dense_model_goes_on_with_several_stages_per_rank(
    ranks: RankPool, dense: Path, tmp_path: Path, saver: Layout
) -> None:
    for loader, difference in continue_in(ranks, dense, tmp_path, saver, DENSE[saver]).items():
        check(loader, saver, difference["loss"])


@pytest.mark.long
@pytest.mark.parametrize("saver", list(MIXTURE), ids=str)
def test_a_mixture_goes_on_with_several_stages_per_rank(
    ranks: RankPool, mixture: Path, tmp_path: Path, saver: Layout
) -> None:
    for loader, difference in continue_in(ranks, mixture, tmp_path, saver, MIXTURE[saver]).items():
        check(loader, saver, difference["loss"])
