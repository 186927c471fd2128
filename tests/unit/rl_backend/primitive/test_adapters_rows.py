"""Whose rows are whose, and what drops them: where ranks share tokens out, and where experts get tokens of several."""

from __future__ import annotations

import pytest
import torch

from rl_backend.primitive.adapters import (
    AdapterRun,
    Factors,
    adapters_at_work,
    dropped,
    runs_of_share,
    split_by_adapter,
)
from rl_backend.primitive.experts import RowOwners, TokenShare, row_owners

ROWS, INPUTS = 24, 40


def factors(dropout: float = 0.5, seed: int = 3) -> Factors:
    a, b = torch.zeros(4, INPUTS), torch.zeros(6, 4)
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 1.0, dropout, seed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_share_tokens_out_have_the_rows_of_each_adapter_once_with_draws_of_their_own(ranks: int) -> None:
    edges = ((0, 5), (5, 14), (16, 23))
    runs = [AdapterRun(start, stop, {}, draw=10 + index, key=index) for index, (start, stop) in enumerate(edges)]
    size = ROWS // ranks
    found = [-1] * ROWS
    draws: set[tuple[int, int | None]] = set()
    for rank in range(ranks):
        for run in runs_of_share(runs, size, rank, ranks):
            assert 0 <= run.start < run.stop <= size
            found[rank * size + run.start : rank * size + run.stop] = [run.key] * (run.stop - run.start)
            # A draw is a micro-batch of one rank: no other part of any micro-batch may drop the same.
            assert run.draw is not None and (run.key, run.draw) not in draws
            draws.add((run.key, run.draw))
    assert found == [
        next((key for key, (start, stop) in enumerate(edges) if start <= row < stop), -1) for row in range(ROWS)
    ]
    next_draws = {
        each.draw for rank in range(ranks) for each in runs_of_share([runs[0].__class__(0, ROWS, {}, 11)], size, rank, ranks)
    }
    this_draws = {
        each.draw for rank in range(ranks) for each in runs_of_share([runs[0].__class__(0, ROWS, {}, 10)], size, rank, ranks)
    }
    assert not next_draws & this_draws and len(this_draws) == ranks
    assert all(run.draw is None for run in runs_of_share([AdapterRun(0, ROWS, {})], size, 0, ranks))


@pytest.mark.shows("lora: tensor-parallel ranks that share tokens out drop inputs independently of each other")
def test_ranks_that_share_tokens_out_drop_other_inputs() -> None:
    whole, mine = [AdapterRun(0, ROWS, {}, draw=4)], factors()
    masks = [
        dropped(torch.ones(ROWS // 2, INPUTS), run.draw, mine) != 0
        for rank in range(2)
        for run in runs_of_share(whole, ROWS // 2, rank, 2)
    ]
    assert 0.35 < float((masks[0] == masks[1]).float().mean()) < 0.65


def test_rows_of_a_share_know_whose_they_are() -> None:
    modules = {7: {"first": factors()}, 9: {"second": factors()}}
    of_experts = {"of_experts": modules}
    runs = [
        AdapterRun(0, 10, {}, draw=2, key=9, **of_experts),  # type: ignore[arg-type]
        AdapterRun(12, 20, {}, draw=None, key=7, **of_experts),  # type: ignore[arg-type]
        AdapterRun(20, 24, {}, draw=5, key=8, **of_experts),  # type: ignore[arg-type]
    ]
    expected = [1] * 10 + [2] * 2 + [0] * 8 + [2] * 4
    with adapters_at_work(runs):
        for rank in range(3):
            owners = row_owners(8, TokenShare(rank, copy=rank % 2, copies=2), torch.device("cpu"))
            assert owners is not None and owners.keys == [7, 9] and owners.kinds == 3
            assert owners.of_rows.tolist() == expected[8 * rank : 8 * rank + 8]
            assert list(owners.modules) == [modules[7], modules[9]]
            # Copies of the experts drop other inputs: 2 * 2 and 2 * 2 + 1.
            assert list(owners.draws) == [-1, 4 + rank % 2]
    with adapters_at_work([AdapterRun(0, 24, {})]):
        assert row_owners(8, TokenShare(), torch.device("cpu")) is None


def test_rows_of_an_expert_are_each_adapters_own_by_sender_where_senders_drop_other_inputs() -> None:
    owners = RowOwners(torch.empty(0), [7, 9], [{"first": factors()}, {"second": factors()}], [-1, -1])
    # Two senders; for each of two experts rows of 7, of 9 and of nobody.
    counts = [[2, 1, 3, 0, 4, 0], [1, 2, 0, 5, 0, 1]]
    found = owners.runs(counts, [[10, -1], [11, -1]])
    assert [(expert, run.start, run.stop, run.draw, next(iter(run.modules))) for expert, run in found] == [
        (0, 0, 2, 10, "first"),
        (0, 2, 3, 11, "first"),
        (0, 3, 6, None, "second"),
        (1, 9, 14, 11, "first"),
        (1, 14, 18, None, "second"),
    ]
    together = owners.runs(counts, [[10, 20], [10, 20]])
    assert [(expert, run.start, run.stop, run.draw) for expert, run in together] == [
        (0, 0, 3, 10),
        (0, 3, 6, 20),
        (1, 9, 14, 10),
        (1, 14, 18, 20),
    ]


def test_what_is_between_adapters_is_nobodys() -> None:
    runs = [AdapterRun(2, 5, {}, key=0), AdapterRun(5, 9, {}, key=1)]
    found = [(rows.start, rows.stop, None if run is None else run.key) for rows, run in split_by_adapter(runs, 12)]
    assert found == [(0, 2, None), (2, 5, 0), (5, 9, 1), (9, 12, None)]


@pytest.mark.parametrize("dropout", [0.1, 0.4, 0.9])
def test_dropout_drops_its_share_and_keeps_the_mean(dropout: float) -> None:
    kept = dropped(torch.full((500, INPUTS), 2.0), 1, factors(dropout))
    assert float((kept == 0).float().mean()) == pytest.approx(dropout, abs=0.02)
    assert float(kept.mean()) == pytest.approx(2.0, rel=0.15)
    torch.testing.assert_close(kept[kept != 0].unique(), torch.tensor([2.0 / (1 - dropout)]))


def test_dropout_of_any_seed_and_dtype_is_told_by_module_and_draw() -> None:
    ones = torch.ones(ROWS, INPUTS)
    masks = [dropped(ones, draw, factors(0.5, seed)) for seed, draw in ((2**62, 1), (2**62, 2), (2**62 + 1, 1), (5, 2**40))]
    assert all(not torch.equal(one, other) for place, one in enumerate(masks) for other in masks[:place])
    assert torch.equal(dropped(ones, 1, factors(0.5, 2**62)), masks[0])
    half = dropped(ones.bfloat16(), 1, factors(0.5, 2**62))
    assert half.dtype == torch.bfloat16 and torch.equal(half.float(), masks[0])


def test_owners_of_experts_are_in_the_order_of_their_numbers_on_every_rank() -> None:
    modules = {9: {"second": factors()}, 7: {"first": factors()}}
    with adapters_at_work(
        [AdapterRun(0, 5, {}, draw=3, key=9, of_experts=modules), AdapterRun(5, 8, {}, key=7, of_experts=modules)]
    ):
        owners = row_owners(8, TokenShare(), torch.device("cpu"))
    assert owners is not None and list(owners.keys) == [7, 9] and list(owners.modules) == [modules[7], modules[9]]
    assert owners.of_rows.tolist() == [1] * 5 + [0] * 3 and list(owners.draws) == [-1, 3]
