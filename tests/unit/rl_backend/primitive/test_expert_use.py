"""How often experts are chosen, by one rank and by several, and the step of a bias."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.router import count_sorted, expert_bias_step, expert_use

CHOSEN = torch.tensor([[0, 3], [3, 1], [4, 3], [1, 0], [3, 4]])


@pytest.mark.parametrize(
    ("padding", "counts", "tokens"),
    [
        (None, [2, 2, 0, 4, 2, 0], 5),
        ([False, True, False, False, True], [2, 1, 0, 2, 1, 0], 3),
        ([True] * 5, [0, 0, 0, 0, 0, 0], 0),
        ([False] * 5, [2, 2, 0, 4, 2, 0], 5),
    ],
)
def test_choices_of_tokens_that_are_no_padding_count(padding: list[bool] | None, counts: list[int], tokens: int) -> None:
    before = CHOSEN.clone()
    use = expert_use(CHOSEN, 6, None if padding is None else torch.tensor(padding))
    assert (use.counts.tolist(), int(use.num_tokens)) == (counts, tokens)
    assert use.counts.dtype == use.num_tokens.dtype == torch.int64 and use.num_tokens.dim() == 0
    assert torch.equal(CHOSEN, before)


def test_counts_and_tokens_of_all_ranks_are_added_up_in_one_reduction() -> None:
    reduced: list[Tensor] = []

    def add(counts: Tensor) -> None:
        reduced.append(counts.clone())
        counts += torch.tensor([1, 0, 5, 0, 0, 0, 4])

    use = expert_use(CHOSEN, 6, torch.tensor([True, False, False, False, False]), add)
    assert [each.tolist() for each in reduced] == [[1, 2, 0, 3, 2, 0, 4]]
    assert (use.counts.tolist(), int(use.num_tokens)) == ([2, 2, 5, 3, 2, 0], 8)


@pytest.mark.parametrize(
    ("numbers", "experts", "expected"),
    [([], 3, [0, 0, 0]), ([0, 0, 2], 3, [2, 0, 1]), ([1, 1, 1], 2, [0, 3]), ([0, 2, 5, 5], 3, [1, 0, 1])],
)
def test_sorted_numbers_are_counted(numbers: list[int], experts: int, expected: list[int]) -> None:
    assert count_sorted(torch.tensor(numbers, dtype=torch.int64), experts).tolist() == expected


@pytest.mark.parametrize(
    ("counts", "signs"), [([4, 4, 4], [0, 0, 0]), ([0, 3, 6], [1, 0, -1]), ([1, 2, 4], [1, 1, -1]), ([0, 0], [0, 0])]
)
def test_a_bias_moves_by_its_rate_towards_the_mean(counts: list[int], signs: list[int]) -> None:
    step = expert_bias_step(torch.tensor(counts), 0.001)
    assert step.dtype == torch.float32
    torch.testing.assert_close(step, 0.001 * torch.tensor(signs, dtype=torch.float32))
