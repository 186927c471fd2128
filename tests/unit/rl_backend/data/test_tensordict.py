from __future__ import annotations

import random

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rl_backend.contracts import BatchError, TokenSequence
from rl_backend.data import sequences_from_tensordict
from tests.support.tensordicts import tensordict_of


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def assert_same(left: TokenSequence, right: TokenSequence) -> None:
    assert torch.equal(left.input_ids, right.input_ids)
    for mine, other in (
        (left.token_fields, right.token_fields),
        (left.sequence_fields, right.sequence_fields),
    ):
        assert mine.keys() == other.keys()
        for name in mine:
            assert mine[name].dtype == other[name].dtype
            assert torch.equal(mine[name], other[name])


def test_sequences_survive_the_way_to_a_tensordict_and_back() -> None:
    generator = random.Random(0)
    for _ in range(30):
        lengths = [generator.randint(1, 12) for _ in range(generator.randint(1, 6))]
        sequences = [
            TokenSequence(
                torch.randint(0, 100, (length,)),
                {
                    "loss_mask": torch.rand(length),
                    "routed_experts": torch.randint(0, 8, (length, 2, 3), dtype=torch.int16),
                    "old_log_probs": torch.randn(length, dtype=torch.bfloat16),
                },
                {"reward": torch.tensor(float(length)), "pixels": torch.randn(2, 2)},
            )
            for length in lengths
        ]
        batch = tensordict_of(sequences)
        assert batch.batch_size == (len(lengths),)
        assert batch["input_ids"].layout == torch.jagged
        for back, original in zip(sequences_from_tensordict(batch), sequences, strict=True):
            assert_same(back, original)


def test_jagged_fields_with_offsets_of_their_own_are_accepted_when_lengths_agree() -> None:
    batch = TensorDict(
        {"input_ids": jagged([torch.arange(3), torch.arange(5)]), "mask": jagged([torch.ones(3), torch.zeros(5)])},
        batch_size=[2],
    )
    first, second = sequences_from_tensordict(batch)
    assert first.token_fields["mask"].tolist() == [1.0] * 3
    assert second.token_fields["mask"].tolist() == [0.0] * 5


def test_dense_input_ids_are_refused() -> None:
    with pytest.raises(BatchError, match="input_ids is missing or dense"):
        sequences_from_tensordict(TensorDict({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, batch_size=[2]))


def test_missing_input_ids_are_refused() -> None:
    with pytest.raises(BatchError, match=r"input_ids is missing or dense; the TensorDict has \['reward'\]"):
        sequences_from_tensordict(TensorDict({"reward": torch.zeros(2)}, batch_size=[2]))


def test_a_jagged_field_of_other_lengths_is_named() -> None:
    batch = TensorDict(
        {"input_ids": jagged([torch.arange(3), torch.arange(5)]), "responses": jagged([torch.ones(3), torch.ones(2)])},
        batch_size=[2],
    )
    with pytest.raises(BatchError, match=r"field 'responses' has shape \(2,\); its first dimension must be 5"):
        sequences_from_tensordict(batch)


def test_data_that_is_no_tensor_is_named() -> None:
    batch = TensorDict({"input_ids": jagged([torch.arange(3)]), "temperature": NonTensorData(0.5)}, batch_size=[1])
    with pytest.raises(BatchError, match=r"'temperature' is a .*pass facts of the whole batch as meta"):
        sequences_from_tensordict(batch)
    nested = TensorDict({"input_ids": jagged([torch.arange(3)]), "more": TensorDict({}, [1])}, batch_size=[1])
    with pytest.raises(BatchError, match="'more' is a TensorDict"):
        sequences_from_tensordict(nested)


def test_a_batch_of_two_dimensions_is_refused() -> None:
    with pytest.raises(BatchError, match="input_ids is missing or dense"):
        sequences_from_tensordict(TensorDict({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, batch_size=[2, 3]))
