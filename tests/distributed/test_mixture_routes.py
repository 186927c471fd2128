"""Routes of GLM-4.5, gpt-oss and MiniMax-M2, recorded and replayed in layouts of either runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest

from tests.distributed.test_router_replay import (
    FULL,
    ONE_RANK,
    ZBV,
    Layout,
    Model,
    assert_same_replay,
    assert_same_routes,
    write_models,
)
from tests.support.rank_pool import RankPool
from tests.support.routes import RouteRun

FAMILIES = ("glm4_moe", "gpt_oss", "minimax_m2")
LAYOUTS: Mapping[str, Layout] = {
    "native tp2 and ep2": Layout("native", 2, {"tp": 2, "ep": 2}),
    "native cp2, recomputed": Layout("native", 2, {"cp": 2}, FULL["native"]),
    "native zbv": Layout("native", 2, {"pp": 2, "vpp": 2}, ZBV),
    "bridge ep2": Layout("bridge", 2, {"ep": 2}),
    "bridge pp2, recomputed": Layout("bridge", 2, {"pp": 2}, FULL["bridge"]),
}
QUICK = {
    ("glm4_moe", "bridge ep2"),
    ("gpt_oss", "native zbv"),
    ("minimax_m2", "native tp2 and ep2"),
}
CASES = [
    pytest.param(family, layout, marks=[] if (family, layout) in QUICK else pytest.mark.long)
    for family in FAMILIES
    for layout in LAYOUTS
]

type Known = Callable[[str], tuple[Model, RouteRun]]


@pytest.fixture(scope="module")
def known(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A family's model, and what one rank of the native runtime does with routes that it recorded itself."""

    @functools.cache
    def of(family: str) -> tuple[Model, RouteRun]:
        folder = tmp_path_factory.mktemp(family)
        # GLM-4.5's first layer is dense. Biases of routers are random: chosen are other experts than those that score best.
        model = write_models(ranks, folder, family, num_hidden_layers=4)
        file = model.file("native")
        model.replay(ONE_RANK["native"], [], save_to=file)
        return model, model.replay(ONE_RANK["native"], [file])

    return of


@pytest.mark.shows("router replay: routes of GLM-4.5, gpt-oss and MiniMax-M2 replay in layouts of both runtimes to 1e-5")
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_routes_of_one_rank_replay_in_a_layout_and_back(known: Known, family: str, layout: str) -> None:
    model, on_one_rank = known(family)
    file, own = model.file("native"), model.file(layout)
    run = model.replay(LAYOUTS[layout], [file], save_to=own)
    assert_same_routes(run, on_one_rank)
    assert_same_replay(run, file, on_one_rank.replays[file])
    assert_same_replay(model.replay(ONE_RANK["native"], [own]), own, on_one_rank.replays[file])
