"""Several projections in one matrix, cut by heads over ranks that hold its rows as of any other."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.parallel import tensor
from rl_backend.parallel.tensor import FusedProjections


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ((4, 4, 8), 2, [[0, 1, 4, 5, 8, 9, 10, 11], [2, 3, 6, 7, 12, 13, 14, 15]]),
        ((3, 6, 3, 9), 3, [[0, 3, 4, 9, 12, 13, 14], [1, 5, 6, 10, 15, 16, 17], [2, 7, 8, 11, 18, 19, 20]]),
        ((2, 4), 1, [[0, 1, 2, 3, 4, 5]]),
    ],
    ids=str,
)
def test_a_rank_gets_the_features_of_its_heads_in_each_projection(
    monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int], ranks: int, expected: list[list[int]]
) -> None:
    groups: list[Any] = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks) for rank in range(ranks)]
    parts = [FusedProjections(sizes, group) for group in groups]
    sent: list[tuple[Tensor, ...]] = []

    def send(features: Tensor, to_each: list[int], from_each: list[int], group: Any) -> Tensor:
        sent.append(features.split(to_each))
        return features

    def receive(features: Tensor, to_each: list[int], from_each: list[int], group: Any) -> Tensor:
        found = [rows[group.rank()] for rows in sent]
        assert [len(each) for each in found] == from_each
        return torch.cat(found)

    # Two tokens, whose outputs are the numbers of their features and ten times those.
    outputs = torch.stack([torch.arange(sum(sizes)), 10 * torch.arange(sum(sizes))])
    held = outputs.chunk(ranks, dim=1)
    for collective in (send, receive):
        monkeypatch.setattr(tensor, "all_to_all_rows", collective)
        found = [part.of_my_heads(mine) for part, mine in zip(parts, held, strict=True)]
    assert [each[0].tolist() for each in found] == expected
    assert all(torch.equal(each[1], 10 * each[0]) for each in found)
    assert [part.rows_of_my_heads(outputs[0]).tolist() for part in parts] == expected
