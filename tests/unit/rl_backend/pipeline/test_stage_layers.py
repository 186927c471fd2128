"""Which layers a stage gets where they do not divide."""

from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError
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


@pytest.mark.parametrize("sizes", [(3, 1, 2, 2), (1, 5, 1, 1)])
def test_given_sizes_are_taken_in_their_order(sizes: tuple[int, ...]) -> None:
    found = split_layers(8, 4, sizes)
    assert tuple(len(part) for part in found) == sizes
    assert [layer for part in found for layer in part] == list(range(8))


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((4, 4), "these are 2 that add up to 8"),
        ((2, 2, 2, 1, 1), "these are 5 that add up to 8"),
        ((3, 3, 3), "these are 3 that add up to 9"),
        ((4, 0, 4), "these are 3 that add up to 8"),
    ],
    ids=str,
)
def test_sizes_of_other_layers_or_stages_are_refused(sizes: tuple[int, ...], told: str) -> None:
    with pytest.raises(ConfigError) as failure:
        split_layers(8, 3, sizes)
    message = str(failure.value)
    assert message.startswith(f"NativeConfig.pipeline_layers={sizes}: expected 3 numbers, one for each of pp * vpp stages")
    assert message.endswith(f"that add up to the model's 8 layers; {told}")


def test_more_stages_than_layers_are_refused_and_as_many_are_not() -> None:
    assert split_layers(3, 3) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(ConfigError, match=r"^ParallelConfig\.pp=4: .*the model has 3; use at most 3 stages$"):
        split_layers(3, 4)
