"""Which layers a stage gets where they do not divide."""

from __future__ import annotations

import pytest

from rl_backend.pipeline.schedule import split_layers


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        # The first stage has the embeddings and the last the head, so stages in the middle take what is over.
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (9, 2, [5, 4]),
        (3, 1, [3]),
    ],
)
def test_layers_that_do_not_divide_go_to_stages_in_the_middle(layers: int, stages: int, expected: list[int]) -> None:
    found = split_layers(layers, stages)
    assert [len(part) for part in found] == expected
    assert [layer for part in found for layer in part] == list(range(layers))
