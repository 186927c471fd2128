"""Routes of the stages of a pipeline, in the order of the model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import PackedBatch, RoutedLayers
from rl_backend.runtime import recording

LENGTHS = ((3, 1), (2,))
"""Of the sequences of two micro-batches."""


@pytest.mark.parametrize(
    ("stages", "places"),
    [
        # The layers with experts that each rank has in each of its stages.
        ([[[0, 1], []], [[2], [3]]], [[0, 1], [2, 3]]),
        ([[[0], [2]], [[1], [3]]], [[0, 2], [1, 3]]),
        ([[[0], [3]], [[1, 2], []]], [[0, 3], [1, 2]]),
        ([[[], []], [[0, 1], [2, 3]]], [[], [0, 1, 2, 3]]),
        ([[[0, 1], [2, 3]]], [[0, 1, 2, 3]]),
    ],
    ids=str,
)
def test_a_layer_has_its_own_routes_whichever_stages_a_rank_has(
    monkeypatch: pytest.MonkeyPatch, stages: Sequence[Sequence[Sequence[int]]], places: Sequence[Sequence[int]]
) -> None:
    routers = RoutedLayers(num_experts=64, top_k=2, sparse=(True, False, True, True, True))
    data = [PackedBatch(torch.arange(sum(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    # Every token, layer and choice has a number of its own.
    whole = torch.arange(6 * 4 * 2).view(6, 4, 2).to(routers.dtype)
    of_batches = whole.split([sum(lengths) for lengths in LENGTHS])
    num_ranks = len(stages)
    mine: list[Tensor] = []

    def gather(routes: Tensor, group: Any) -> Tensor:
        mine.append(routes)
        return torch.cat((mine * num_ranks)[:num_ranks])

    monkeypatch.setattr(recording, "gather_rows", gather)
    group: Any = SimpleNamespace(size=lambda: num_ranks)
    found: list[Tensor] = []
    for numbers in stages:
        chosen = {
            (index, number * num_ranks): of_batch[:, list(layers)]
            for number, layers in enumerate(numbers)
            if layers
            for index, of_batch in enumerate(of_batches)
        }
        found = recording.gather_stages(chosen, data, places, routers, group, torch.device("cpu"))
    # The last rank was asked when all had given theirs.
    assert [len(each) for each in found] == [3, 1, 2]
    assert torch.equal(torch.cat(found), whole)
