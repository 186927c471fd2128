"""Shares of weights of an engine whose ranks hold no rectangles of them: rows of what is gathered, dealt out evenly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import WeightShard
from tests.support.rank_threads import run_ranks
from tests.support.standing_runtime import StandingEngine

WEIGHTS = {
    name: torch.arange(float(torch.Size(shape).numel())).view(shape)
    for name, shape in {"matrix": (5, 2), "row": (1, 3), "vector": (4,), "packed": (3, 4, 2)}.items()
}


class Gathering(StandingEngine):
    def __init__(self) -> None:
        super().__init__([])
        self.asked: list[tuple[Any, ...]] = []

    def gather_weights(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return iter(WEIGHTS.items())

    def stream(self, weights: Any) -> Any:
        return ((f"{name}, streamed", tensor) for name, tensor in weights)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_row_is_one_ranks_and_shares_say_where_they_begin(ranks: int) -> None:
    def of_rank(group: dist.ProcessGroup) -> list[WeightShard]:
        engine, handle = Gathering(), object()
        found: Iterator[WeightShard] = engine.shards(handle, torch.bfloat16)  # type: ignore[arg-type]
        shards = list(found)
        assert engine.asked == [(handle, torch.bfloat16, None, None)]
        return shards

    found = run_ranks(of_rank, ranks)
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        whole: list[Tensor] = []
        for rank, shards in enumerate(found):
            shard, size = shards[number], -(-weight.shape[0] // ranks)
            assert (shard.name, shard.shape) == (f"{name}, streamed", tuple(weight.shape))
            assert shard.offset == (min(rank * size, weight.shape[0]), *[0] * (weight.dim() - 1))
            assert shard.tensor.shape[1:] == weight.shape[1:]
            whole.append(shard.tensor)
        assert torch.equal(torch.cat(whole), weight)
