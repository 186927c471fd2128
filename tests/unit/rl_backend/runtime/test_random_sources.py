"""Whose random state a rank takes from a checkpoint."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_backend.contracts import ParallelConfig
from rl_backend.runtime.checkpoints import RankLayout, _origins, source_rank

RANKS = 8
LAYOUTS = [
    RankLayout("native", ParallelConfig(tp=tp, pp=pp, cp=cp), RANKS)
    for tp, pp, cp in itertools.product((1, 2, 4), repeat=3)
    if RANKS % (tp * pp * cp) == 0
]


def data_parallel_ranks(layout: RankLayout) -> list[int]:
    """By rank, from the grid that the runtimes lay their ranks out on."""
    parallel = layout.parallel
    grid = torch.arange(layout.world_size).view(parallel.pp, -1, parallel.cp, parallel.tp)
    return [int((grid == rank).nonzero()[0, 1]) for rank in range(layout.world_size)]


def test_in_the_layout_of_the_save_every_rank_takes_its_own() -> None:
    for layout in LAYOUTS:
        for differs in ("replicas", "tensor_ranks", "expert_ranks", "nowhere"):
            assert [source_rank(rank, layout, layout, differs) for rank in range(RANKS)] == list(range(RANKS))


def test_in_another_layout_a_replica_takes_that_of_the_replica_of_its_number() -> None:
    for saved, here in itertools.permutations(LAYOUTS, 2):
        of_saved = data_parallel_ranks(saved)
        for rank, data_parallel_rank in enumerate(data_parallel_ranks(here)):
            expected = of_saved.index(data_parallel_rank) if data_parallel_rank in of_saved else None
            assert source_rank(rank, here, saved, "replicas") == expected, (saved, here, rank)


def test_streams_that_differ_inside_a_replica_go_on_where_there_are_as_many() -> None:
    wide = RankLayout("bridge", ParallelConfig(tp=2, ep=2), 4)
    narrow = RankLayout("bridge", ParallelConfig(tp=2, ep=2), 2)
    single = RankLayout("bridge", ParallelConfig(), 2)
    assert [source_rank(rank, wide, narrow, "tensor_ranks") for rank in range(4)] == [0, 1, 0, 1]
    assert [source_rank(rank, wide, narrow, "expert_ranks") for rank in range(4)] == [0, 1, 0, 1]
    assert [source_rank(rank, narrow, single, "tensor_ranks") for rank in range(2)] == [None, None]
    assert [source_rank(rank, narrow, single, "expert_ranks") for rank in range(2)] == [None, None]
    assert [source_rank(rank, narrow, single, "nowhere") for rank in range(2)] == [0, 0]


def test_another_runtimes_configuration_has_no_layout() -> None:
    assert RankLayout.of({"backend": "other", "backend_cfg": {"rate": 1}}, 2) is None
    assert RankLayout.of({"backend": "native", "backend_cfg": {"parallel": {"tp": 2}}}, 3) is None
    found = RankLayout.of({"backend": "native", "backend_cfg": {"parallel": {"tp": 2}}}, 4)
    assert found == RankLayout("native", ParallelConfig(tp=2), 4)


@pytest.mark.parametrize(
    ("saved", "here", "expected"),
    [
        # Replica r of the save is rank r, and replica r of two ranks here is ranks 2r and 2r + 1.
        ({}, {"tp": 2}, ["0", "0", "1", "1"]),
        ({"tp": 2}, {}, ["0", "2", "none", "none"]),
        ({"tp": 2}, {"tp": 2}, ["0", "1", "2", "3"]),
    ],
    ids=str,
)
def test_a_rank_looks_for_the_stream_of_its_replica_under_the_layout_of_the_save(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, int], here: dict[str, int], expected: list[str]
) -> None:
    def dumped(parallel: dict[str, int]) -> dict[str, Any]:
        return {"backend": "native", "backend_cfg": {"parallel": parallel}}

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    handle: Any = SimpleNamespace(config=SimpleNamespace(model_dump=lambda mode: dumped(here)))
    manifest: Any = SimpleNamespace(runtime_config=dumped(saved), world_size=4)
    found: list[str] = []
    for rank in range(4):
        names = ["model.weight", f"random.cpu.{rank}"]
        origins = _origins(handle, manifest, names, lambda stream: "replicas")
        assert origins["model.weight"] == "model.weight"
        found.append(origins[f"random.cpu.{rank}"].removeprefix("random.cpu."))
    assert found == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"backend": "native"},
        {"backend": "native", "backend_cfg": None},
        {"backend": "native", "backend_cfg": {"parallel": None}},
        {"backend": "native", "backend_cfg": {"parallel": {"tp": 0}}},
        {"backend": "native", "backend_cfg": {"parallel": {"rings": 2}}},
        {"backend_cfg": {"parallel": {"tp": 2}}},
    ],
    ids=str,
)
def test_a_configuration_without_sizes_of_ours_has_no_layout(config: dict[str, Any]) -> None:
    assert RankLayout.of(config, 2) is None


def test_streams_of_experts_go_on_where_experts_have_as_many_parts() -> None:
    here = RankLayout("bridge", ParallelConfig(tp=2, ep=2, etp=2), 8)
    saved = RankLayout("bridge", ParallelConfig(ep=2, etp=2), 4)
    assert [source_rank(rank, here, saved, "expert_ranks") for rank in range(8)] == [0, 1, 2, 3] * 2
    for other in ({"ep": 2}, {"etp": 2}, {"ep": 4}, {"ep": 1, "etp": 4}):
        layout = RankLayout("bridge", ParallelConfig(**other), 4)
        assert [source_rank(rank, here, layout, "expert_ranks") for rank in range(8)] == [None] * 8
