"""Keys that a rollout has recorded: padded for a sequence, and refused where they are not ones of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_backend.contracts import BatchError, IndexedLayers, PackedBatch, check_keys, key_fields

INDEXED = IndexedLayers(top_k=3, layers=(2, 5))
LENGTHS = (4, 2)
RIGHT = [
    [[0, -1, -1], [0, -1, -1]],
    [[1, 0, -1], [0, 1, -1]],
    [[2, 0, 1], [0, 1, 2]],
    [[3, 0, 2], [1, 3, 2]],
    [[0, -1, -1], [0, -1, -1]],
    [[-1, -1, -1], [1, 0, -1]],
]
"""Of six tokens in two layers; the last chooses anew in the first layer."""


def batch(keys: Any) -> PackedBatch:
    given = keys if isinstance(keys, torch.Tensor) else torch.tensor(keys, dtype=torch.int32)
    return PackedBatch(torch.arange(6), torch.tensor(LENGTHS), {"indexed_keys": given})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keys_of_the_first_tokens_are_padded_with_minus_one(dtype: torch.dtype) -> None:
    keys = torch.arange(12, dtype=dtype).view(2, 2, 3)
    (name, padded), *rest = key_fields(keys, 4).items()
    assert name == "indexed_keys" and not rest
    assert padded.dtype == dtype and padded.shape == (4, 2, 3)
    assert torch.equal(padded[:2], keys) and (padded[2:] == -1).all()
    assert torch.equal(key_fields(keys, 2)["indexed_keys"], keys)


def test_keys_of_the_model_pass() -> None:
    check_keys(batch(RIGHT), INDEXED)
    check_keys(batch(torch.full((6, 2, 3), -1)), INDEXED)


def changed(token: int, layer: int, keys: list[int]) -> list[list[list[int]]]:
    found = [[list(each) for each in row] for row in RIGHT]
    found[token][layer] = keys
    return found


@pytest.mark.parametrize(
    ("token", "layer", "keys", "problem", "place"),
    [
        (3, 1, [-2, 0, 1], "a place below -1", 3),
        (4, 0, [1, -1, -1], "a place behind its own", 0),
        (5, 1, [2, 0, -1], "a place behind its own", 1),
        (2, 0, [2, 2, 0], "a place twice", 2),
        (3, 0, [0, 0, 1], "a place twice", 3),
        (3, 1, [0, 1, -1], "more or fewer places than it can see", 3),
        (1, 0, [0, -1, -1], "more or fewer places than it can see", 1),
    ],
)
def test_a_token_with_wrong_keys_is_named_with_its_place_and_layer(
    token: int, layer: int, keys: list[int], problem: str, place: int
) -> None:
    said = f"has {problem} for token {token} of the micro-batch, at place {place} of its sequence, in layer {layer} of"
    with pytest.raises(BatchError) as refused:
        check_keys(batch(changed(token, layer, keys)), INDEXED)
    assert said in str(refused.value) and f"{keys}" in str(refused.value) and "top_k=3" in str(refused.value)


def test_keys_for_another_model_are_refused() -> None:
    for none in (None, IndexedLayers(3, ())):
        with pytest.raises(BatchError, match="this model attends to all keys, so recorded ones would be ignored"):
            check_keys(batch(RIGHT), none)
    for other in (IndexedLayers(3, (2, 5, 7)), IndexedLayers(4, (2, 5))):
        expected = (6, len(other.layers), other.top_k)
        with pytest.raises(BatchError) as refused:
            check_keys(batch(RIGHT), other)
        assert f"(tokens, layers, top_k) = {expected}" in str(refused.value)
        assert f"{len(other.layers)} layers with an indexer, {list(other.layers)}" in str(refused.value)
    with pytest.raises(BatchError, match=r"dtype torch\.int16"):
        check_keys(batch(torch.zeros(6, 2, 3, dtype=torch.int16)), INDEXED)
    with pytest.raises(BatchError, match="'indexed_keys' is missing"):
        check_keys(PackedBatch(torch.arange(2), torch.tensor([2])), INDEXED)
