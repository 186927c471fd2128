"""Routes recorded in any layout of either runtime, and replayed in any other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import BatchError, PackedBatch
from rl_backend.runtime import RouterReplay
from tests.support.matrix import sampled
from tests.support.moe import write_moe
from tests.support.native import LENGTHS, assert_near, micro_batches
from tests.support.qwen3_5 import write_qwen3_5
from tests.support.rank_pool import RankPool
from tests.support.routes import Pass, RouteRun, opened, routes_job, sorted_routes, with_routes

FULL: dict[str, dict[str, Any]] = {
    "native": {"activation_checkpointing": "full"},
    "bridge": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
ZBV = {"pipeline_schedule": "zbv"}


class Layout(NamedTuple):
    """Attributes:
    settings: of the runtime's configuration.
    """

    backend: str
    world: int
    parallel: Mapping[str, int] = {}
    settings: Mapping[str, Any] = {}


ONE_RANK = {backend: Layout(backend, 1) for backend in ("native", "bridge")}
LAYOUTS = {
    "native dp2": Layout("native", 2),
    "native tp2": Layout("native", 2, {"tp": 2}),
    "native ep2": Layout("native", 2, {"ep": 2}),
    "native etp2, recomputed": Layout("native", 2, {"etp": 2}, FULL["native"]),
    "native cp2": Layout("native", 2, {"cp": 2}),
    "native pp2": Layout("native", 2, {"pp": 2}),
    "native vpp2": Layout("native", 2, {"pp": 2, "vpp": 2}),
    "native zbv, recomputed": Layout("native", 2, {"pp": 2, "vpp": 2}, ZBV | FULL["native"]),
    "native cp2 in pp2": Layout("native", 4, {"pp": 2, "cp": 2}),
    "bridge dp2": Layout("bridge", 2),
    "bridge tp2": Layout("bridge", 2, {"tp": 2}),
    "bridge ep2": Layout("bridge", 2, {"ep": 2}),
    "bridge pp2": Layout("bridge", 2, {"pp": 2}),
    "bridge vpp2, recomputed": Layout("bridge", 2, {"pp": 2, "vpp": 2}, FULL["bridge"]),
}


@dataclass
class Model:
    """Attributes:
    paths: a model, and one with other weights.
    folder: of recorded routes.
    ranks: the pool.
    sparse: for each layer, whether it has experts; empty where all have.
    """

    paths: tuple[str, str]
    folder: Path
    ranks: RankPool
    sparse: tuple[bool, ...] = ()

    def file(self, name: str) -> str:
        """Routes of the other weights, recorded in a layout."""
        return str(self.folder / f"{name}.pt")

    def recorded_on_one_rank(self) -> list[str]:
        """Files of both runtimes."""
        for name, layout in ONE_RANK.items():
            if not Path(self.file(name)).exists():
                self.replay(layout, [], save_to=self.file(name))
        return [self.file(name) for name in ONE_RANK]

    def replay(self, layout: Layout, files: Sequence[str], save_to: str = "") -> RouteRun:
        backend, world, parallel, settings = layout
        job = (backend, self.paths, parallel, settings, files, save_to, self.sparse)
        runs = self.ranks.run(routes_job, *job, world_size=world)
        assert all(run.same for run in runs), "replaying what was recorded changed the loss or a gradient"
        return runs[0]


def write_models(ranks: RankPool, folder: Path, case: str, sparse: tuple[bool, ...] = (), **changes: Any) -> Model:
    first, second = (str(write_moe(case, folder / f"{seed}", seed=seed, **changes)) for seed in (0, 1))
    return Model((first, second), folder, ranks, sparse)


def assert_same_routes(run: RouteRun, expected: RouteRun) -> None:
    for routes, others in ((run.recorded, expected.recorded), (run.other, expected.other)):
        assert torch.equal(sorted_routes(routes), sorted_routes(others))


def assert_same_replay(run: RouteRun, file: str, expected: Pass) -> None:
    assert run.replays[file].loss == pytest.approx(expected.loss, rel=1e-5)
    assert_near(run.replays[file].gradients, expected.gradients)


@pytest.fixture(scope="module")
def model(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_models(ranks, tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=4, num_experts=8)


@pytest.fixture(scope="module")
def on_one_rank(model: Model) -> RouteRun:
    """The reference: one rank of the native runtime."""
    run = model.replay(ONE_RANK["native"], model.recorded_on_one_rank())
    differ = sorted_routes(run.recorded) != sorted_routes(run.other)
    assert float(differ.any(-1).float().mean()) > 0.5, "the other weights route otherwise"
    return run


@pytest.mark.shows("router replay: routes recorded on one rank replay in every layout with its loss and gradients to 1e-5")
@pytest.mark.shows("router replay: routes recorded in every layout replay the same way on one rank of the other runtime")
@pytest.mark.parametrize("name", sampled(LAYOUTS, "native etp2, recomputed", "native vpp2", "bridge tp2"))
def test_every_layout_replays_what_one_rank_recorded(model: Model, on_one_rank: RouteRun, name: str) -> None:
    run = model.replay(LAYOUTS[name], model.recorded_on_one_rank(), save_to=model.file(name))
    assert_same_routes(run, on_one_rank)
    for file in model.recorded_on_one_rank():
        assert_same_replay(run, file, on_one_rank.replays[file])
    # All recorded the same, the reference too.
    own, other = model.file(name), ONE_RANK["bridge" if LAYOUTS[name].backend == "native" else "native"]
    assert_same_replay(model.replay(other, [own]), own, on_one_rank.replays[model.file("native")])


def refusals_job(backend: str, model: str) -> list[str]:
    """What two tensor-parallel ranks are told about routes, and about a kind of pass, that only one of them has."""
    messages = []
    with opened(backend, model, {"tp": 2}, {}) as runtime:
        handle = runtime.build_model(forward_only=True)
        data = micro_batches([[0, 1]])
        one = with_routes(data, [[0, 1]], {index: torch.tensor([[[0, 1]] * 4] * LENGTHS[index]) for index in (0, 1)})
        other = with_routes(data, [[0, 1]], {index: torch.tensor([[[2, 3]] * 4] * LENGTHS[index]) for index in (0, 1)})
        first = dist.get_rank() == 0
        cases: list[tuple[list[PackedBatch], RouterReplay]] = [
            (one if first else other, "replay"),
            (one, "replay" if first else "record"),
        ]
        for batches, mode in cases:
            try:
                runtime.forward_backward(handle, batches, None, forward_only=True, router_replay=mode)
            except BatchError as error:
                messages.append(str(error))
    return messages


@pytest.mark.parametrize("backend", ONE_RANK)
def test_ranks_with_different_routes_are_refused_before_they_compute(model: Model, backend: str) -> None:
    for routes, kind in model.ranks.run(refusals_job, backend, model.paths[0], world_size=2):
        assert "one model replica" in routes and "different micro-batches" in routes
        assert "forward_only, router_replay or the LoRA tenants with a loss differ between ranks" in kind


# The first stage and the last have no experts, so with a V schedule neither has the rank of both.
MIXED = {
    "native zbv": Layout("native", 2, {"pp": 2, "vpp": 2}, ZBV),
    "native cp2 and ep2": Layout("native", 2, {"cp": 2, "ep": 2}),
    "bridge vpp2": Layout("bridge", 2, {"pp": 2, "vpp": 2}),
    "bridge pp2, recomputed": Layout("bridge", 2, {"pp": 2}, FULL["bridge"]),
}


@pytest.fixture(scope="module")
def mixed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Model:
    sparse = (False, True, True, False)
    changes: dict[str, Any] = {"num_hidden_layers": 4, "decoder_sparse_step": 1, "mlp_only_layers": [0, 3]}
    return write_models(ranks, tmp_path_factory.mktemp("mixed"), "qwen3_moe", sparse, **changes)


@pytest.fixture(scope="module")
def mixed_on_one_rank(mixed: Model) -> RouteRun:
    return mixed.replay(ONE_RANK["native"], mixed.recorded_on_one_rank())


@pytest.mark.shows(
    "router replay: both runtimes replay with dense layers between those with experts, and with ranks without experts"
)
@pytest.mark.parametrize("name", sampled(MIXED, "bridge pp2, recomputed"))
def test_layers_without_experts_shift_no_routes(mixed: Model, mixed_on_one_rank: RouteRun, name: str) -> None:
    files = mixed.recorded_on_one_rank()
    run = mixed.replay(MIXED[name], files)
    assert_same_routes(run, mixed_on_one_rank)
    for file in files:
        assert_same_replay(run, file, mixed_on_one_rank.replays[file])


# States and convolutions between the layers that route, and experts that no route chooses.
HYBRID = {
    "native tp2 and ep2": Layout("native", 2, {"tp": 2, "ep": 2}),
    "native cp2, recomputed": Layout("native", 2, {"cp": 2}, FULL["native"]),
    "native zbv": Layout("native", 2, {"pp": 2, "vpp": 2}, ZBV),
}


@pytest.fixture(scope="module")
def hybrid(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("hybrid")
    first, second = (str(write_qwen3_5(folder / f"{seed}", moe=True, seed=seed)) for seed in (0, 1))
    model = Model((first, second), folder, ranks)
    model.replay(ONE_RANK["native"], [], save_to=model.file("native"))
    return model


@pytest.fixture(scope="module")
def hybrid_on_one_rank(hybrid: Model) -> RouteRun:
    return hybrid.replay(ONE_RANK["native"], [hybrid.file("native")])


@pytest.mark.shows("router replay: routes of a mixture with shared experts and recurrent states replay in every layout")
@pytest.mark.parametrize("name", sampled(HYBRID, "native cp2, recomputed"))
def test_a_mixture_with_states_and_shared_experts_replays(hybrid: Model, hybrid_on_one_rank: RouteRun, name: str) -> None:
    file, own = hybrid.file("native"), hybrid.file(name)
    expected = hybrid_on_one_rank.replays[file]
    run = hybrid.replay(HYBRID[name], [file], save_to=own)
    assert_same_routes(run, hybrid_on_one_rank)
    assert_same_replay(run, file, expected)
    assert_same_replay(hybrid.replay(ONE_RANK["native"], [own]), own, expected)
