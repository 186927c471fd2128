from __future__ import annotations

import pytest
import torch

from rl_backend.contracts import BatchError, TokenSequence
from rl_backend.data import pack


def sequence(length: int, start: int = 0, **token_fields: torch.Tensor) -> TokenSequence:
    return TokenSequence(torch.arange(start, start + length), token_fields)


def test_packing_lays_sequences_end_to_end_and_splits_back() -> None:
    routes = [torch.randint(0, 8, (length, 2, 3)) for length in (3, 1, 4)]
    sequences = [
        TokenSequence(torch.arange(len(route)) + 10 * i, {"routes": route}, {"reward": torch.tensor(float(i))})
        for i, route in enumerate(routes)
    ]
    batch = pack(sequences, {"temperature": 0.7})
    assert batch.num_sequences == 3 and batch.num_tokens == 8
    assert batch.seq_lens.tolist() == [3, 1, 4]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.sequence_fields["reward"].tolist() == [0.0, 1.0, 2.0]
    assert batch.meta == {"temperature": 0.7}
    for got, expected in zip(batch.split(batch.token_fields["routes"]), routes, strict=True):
        assert torch.equal(got, expected)


def test_labels_are_the_next_token_of_the_same_sequence() -> None:
    batch = pack([sequence(3, 10), sequence(1, 20), sequence(2, 30)])
    assert batch.labels.tolist() == [11, 12, -100, -100, 31, -100]
    assert batch.sequence_ids.tolist() == [0, 0, 0, 1, 2, 2]


def test_the_sequence_whose_fields_differ_is_named() -> None:
    usual = [sequence(2, mask=torch.ones(2)) for _ in range(3)]
    with pytest.raises(BatchError, match=r"sequence 1 lacks \['mask'\]") as raised:
        pack([usual[0], sequence(2), *usual[1:]])
    assert raised.value.details == {"index": 1, "names": ["mask"]}
    with pytest.raises(BatchError, match=r"sequence 0 has \['extra'\] which the others lack"):
        pack([sequence(2, mask=torch.ones(2), extra=torch.ones(2)), *usual])
    odd = TokenSequence(torch.arange(2), {"mask": torch.ones(2)}, {"reward": torch.tensor(1.0)})
    with pytest.raises(BatchError, match=r"sequence 3 has \['reward'\].*sequence fields"):
        pack([*usual, odd])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (torch.ones(2, 4), r"'mask' of sequence 2 has shape \(L, 4\).*other sequences have shape \(L\)"),
        (torch.ones(2, dtype=torch.int32), r"'mask' of sequence 2 .*torch.int32.*torch.float32"),
    ],
)
def test_the_sequence_whose_field_has_another_shape_or_dtype_is_named(odd: torch.Tensor, message: str) -> None:
    usual = sequence(2, mask=torch.ones(2))
    with pytest.raises(BatchError, match=message):
        pack([usual, usual, sequence(2, mask=odd)])


def test_sequence_fields_of_different_shapes_are_refused_by_index() -> None:
    good = TokenSequence(torch.arange(2), {}, {"image": torch.ones(4)})
    bad = TokenSequence(torch.arange(2), {}, {"image": torch.ones(5)})
    with pytest.raises(BatchError, match=r"sequence field 'image' of sequence 1 has shape \(5\)"):
        pack([good, bad, good])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BatchError, match="no sequences"):
        pack([])
