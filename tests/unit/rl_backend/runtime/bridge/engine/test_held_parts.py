"""Who sends which rectangle of the weights of a Megatron model, and which weights all ranks gather."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from rl_backend.contracts import TensorInfo, UnsupportedError, WeightShard
from rl_backend.runtime.bridge.engine import sharding
from rl_backend.runtime.bridge.engine.sharding import Block, export_parts, find_parts, part_infos
from tests.support.rank_threads import run_ranks

WEIGHTS: Mapping[str, Tensor] = {
    "rows": torch.arange(12.0).view(4, 3),
    "half": torch.arange(4.0).view(2, 2) + 20,
    "exact": torch.arange(3.0) + 30,
    "nowhere": torch.arange(2.0) + 40,
}
TOP, BOTTOM = ((0, 0), (2, 3)), ((2, 0), (2, 3))
HOLDS: Mapping[int, Mapping[str, list[Any]]] = {
    0: {"rows": [TOP], "exact": [((0,), (3,))]},
    1: {"rows": [BOTTOM], "half": [((1, 0), (1, 2))], "exact": [((0,), (3,))]},
    2: {"rows": [BOTTOM], "exact": [((0,), (3,))]},
}
"""Of "half" one row is nobody's rectangle, of "nowhere" all."""


def cut(name: str, rectangle: Any) -> Tensor:
    start, shape = rectangle
    return WEIGHTS[name][tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_rank(handle: Any) -> dict[str, dict[Any, Tensor]]:
        mine = HOLDS[handle.groups.world_group.rank()]
        return {name: {each: cut(name, each) for each in rectangles} for name, rectangles in mine.items()}

    monkeypatch.setattr(sharding, "_held", of_rank)


def handle_of(group: dist.ProcessGroup) -> Any:
    infos = [TensorInfo.of(name, value.shape, value.dtype) for name, value in WEIGHTS.items()]
    return SimpleNamespace(weights=infos, in_float32={"exact"}, groups=SimpleNamespace(world_group=group))


def gathered(closed: list[str], *more: str) -> Generator[tuple[str, Tensor]]:
    """As streams of weights are, it has begun."""

    def stream() -> Generator[tuple[str, Tensor]]:
        try:
            yield "", torch.empty(0)
            for name in ("half", "nowhere", *more):
                yield name, WEIGHTS[name].to(torch.bfloat16)
        finally:
            closed.append("closed")

    started = stream()
    next(started)
    return started


def test_of_ranks_with_a_rectangle_one_sends_it_and_what_is_not_covered_all_gather() -> None:
    def of_rank(group: dist.ProcessGroup) -> tuple[Any, Any]:
        handle = handle_of(group)
        parts = find_parts(handle)
        return parts, part_infos(handle, parts, torch.bfloat16)

    found = run_ranks(of_rank, 3)
    assert found[0] == found[1] == found[2]
    parts, infos = found[0]
    assert parts.gathered == {"half", "nowhere"}
    # The first rank has the most that is its alone, with what it sends for all; the others share the rest.
    assert parts.senders == {
        "rows": {TOP: 0, BOTTOM: 1},
        "half": {((0, 0), (2, 2)): 0},
        "exact": {((0,), (3,)): 2},
        "nowhere": {((0,), (2,)): 0},
    }
    assert [(str(info), info.rank, info.whole, info.dtype) for info in infos] == [
        ("rows[0:2, 0:3]", 0, (4, 3), "bfloat16"),
        ("rows[2:4, 0:3]", 1, (4, 3), "bfloat16"),
        ("half[0:2, 0:2]", 0, (2, 2), "bfloat16"),
        ("exact[0:3]", 2, (3,), "float32"),
        ("nowhere[0:2]", 0, (2,), "bfloat16"),
    ]


def test_each_rank_gives_what_it_sends_and_reads_what_is_gathered_to_its_end() -> None:
    def of_rank(group: dist.ProcessGroup) -> tuple[list[WeightShard], list[str]]:
        handle, closed = handle_of(group), list[str]()
        parts = find_parts(handle)
        return list(export_parts(handle, parts, torch.bfloat16, gathered(closed))), closed

    found = run_ranks(of_rank, 3)
    assert [[str(shard) for shard in shards] for shards, _ in found] == [
        ["rows[0:2, 0:3]", "half[0:2, 0:2]", "nowhere[0:2]"],
        ["rows[2:4, 0:3]"],
        ["exact[0:3]"],
    ]
    for shards, closed in found:
        assert closed == ["closed"]
        for shard in shards:
            assert shard.shape == tuple(WEIGHTS[shard.name].shape)
            assert shard.tensor.dtype == (torch.float32 if shard.name == "exact" else torch.bfloat16)
            assert torch.equal(shard.tensor.float(), cut(shard.name, (shard.offset, shard.tensor.shape)))


def test_what_is_gathered_is_closed_with_the_export_and_has_no_more_than_is_sent() -> None:
    def of_rank(group: dist.ProcessGroup) -> list[str]:
        handle, closed = handle_of(group), list[str]()
        parts = find_parts(handle)
        export = export_parts(handle, parts, None, gathered(closed))
        next(export)
        export.close()
        with pytest.raises(AssertionError, match="no more is gathered than is sent"):
            list(export_parts(handle, parts, None, gathered(closed, "exact")))
        return closed

    assert run_ranks(of_rank, 3) == [["closed", "closed"]] * 3


@pytest.mark.parametrize(
    ("replica", "writes"),
    [((0, 0, 0), True), ((0, 0, 3), True), ((1, 0, 0), False), ((0, 2, 0), False), ((1, 1, 1), False), (0, True)],
    ids=str,
)
def test_of_copies_on_other_ranks_of_a_replica_the_first_is_saved(replica: Any, writes: bool) -> None:
    tensor = torch.zeros(2, 3)
    sharded = ShardedTensor.from_rank_offsets("layer", tensor, replica_id=replica)
    assert Block(sharded, tensor, None).writes is writes


def test_a_block_whose_rows_do_not_lie_together_is_refused() -> None:
    tensor = torch.zeros(4, 6)
    names: Any = SimpleNamespace(rows=lambda *_: None)
    whole = ShardedTensor.from_rank_offsets("layer", tensor, replica_id=0)
    (block,) = sharding._blocks(whole, names)
    assert block.tensor is tensor and block.start == 0
    turned = ShardedTensor.from_rank_offsets("layer", tensor.t(), replica_id=0)
    with pytest.raises(UnsupportedError, match=r"^layer: Megatron splits it for a checkpoint into blocks that do not lie"):
        list(sharding._blocks(turned, names))
