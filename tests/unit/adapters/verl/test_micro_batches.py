"""How many micro-batches verl's batch is cut into."""

from __future__ import annotations

import pytest
import torch

from adapters.verl.micro_batches import cut_batch
from rl_backend.runtime.interface import RankPlace
from tests.support.verl_batches import make_batch, rows


@pytest.mark.parametrize(("multiple", "expected"), [(1, 3), (2, 4), (4, 4)])
def test_a_schedule_that_takes_groups_of_micro_batches_gets_whole_groups(multiple: int, expected: int) -> None:
    batch = make_batch(rows(), "full", use_dynamic_bsz=True, max_token_len_per_gpu=38)
    place = RankPlace(torch.device("cpu"), 0, 1, None, True)  # type: ignore[arg-type]
    cut = cut_batch(batch, place, multiple=multiple, cp_size=1)
    assert len(cut.packed) == expected
    assert sorted(cut.order) == list(range(8))
