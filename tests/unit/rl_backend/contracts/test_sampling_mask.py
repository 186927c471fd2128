"""Masks that an engine returns: what cannot have come with the tokens of a batch is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, check_mask

MASK = torch.tensor([[-1, -1, -1], [0, 3, 5], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32)


def batch(mask: Tensor, meta: dict[str, Any] | None = None, targets: tuple[int, ...] = (-100, 5, 2, -100)) -> PackedBatch:
    fields = {"target_ids": torch.tensor(targets), "sampling_mask": mask}
    return PackedBatch(torch.tensor([4, 1, 5, 2]), torch.tensor([4]), fields, meta={"top_k": 3} if meta is None else meta)


def test_a_mask_cuts_as_it_is_given() -> None:
    for dtype in (torch.int32, torch.int64):
        given = batch(MASK.to(dtype))
        check_mask(given, 6)
        assert given.cuts is not None and given.cuts.top_k == 3 and given.cuts.mask is given.token_fields["sampling_mask"]
    check_mask(batch(torch.full((4, 1), -1), targets=(-100,) * 4), 6)


def changed(row: int, *words: int) -> Tensor:
    mask = MASK.clone()
    mask[row] = torch.tensor(words)
    return mask


@pytest.mark.shows("model: an engine's mask of other tokens or another vocabulary is refused before a pass")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (batch(MASK[:, 0]), r"sampling_mask has shape \(4,\) and dtype torch.int32; expected int32 or int64"),
        (batch(MASK[:, :0]), r"has shape \(4, 0\)"),
        (batch(MASK.float()), "and dtype torch.float32"),
        (batch(MASK, {"temperature": 0.5}), "without top_p, top_k or min_p in meta"),
        (batch(MASK, {"top_k": 0}), "without top_p, top_k or min_p in meta"),
        (batch(changed(1, 0, 5, 6)), r"a word outside of the vocabulary, 0 to 5 at token 1 of the micro-batch"),
        (batch(changed(1, -2, 0, 5)), "a word outside of the vocabulary"),
        (batch(changed(1, 3, 0, 5)), r"words that do not ascend at token 1 .*, before token 5: \[3, 0, 5\]"),
        (batch(changed(1, 0, 5, 5)), "words that do not ascend"),
        (batch(changed(2, -1, 1, 2)), "words that do not ascend at token 2"),
        (batch(MASK, targets=(-100, 5, 3, -100)), "no place for the token that was sampled at token 2 .*, before token 3"),
        (batch(MASK, targets=(1, 5, 2, -100)), r"no place .* at token 0 .* -100 before tokens that were not sampled"),
    ],
)
def test_what_tokens_cannot_have_been_sampled_from_is_refused(given: PackedBatch, message: str) -> None:
    with pytest.raises(BatchError, match=message) as refused:
        check_mask(given, 6)
    assert refused.value.details["name"] == "sampling_mask"


def test_one_token_is_sampled_at_a_position() -> None:
    several = PackedBatch(
        torch.arange(4), torch.tensor([4]), {"target_ids": torch.zeros(4, 2, dtype=torch.int64), "sampling_mask": MASK}
    )
    with pytest.raises(BatchError, match="without top_p"):
        check_mask(several, 6)
    with pytest.raises(BatchError, match="which is sampled is unknown"):
        check_mask(PackedBatch(several.input_ids, several.seq_lens, several.token_fields, meta={"top_k": 3}), 6)
