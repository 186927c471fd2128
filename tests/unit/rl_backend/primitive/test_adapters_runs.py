"""Which rows are an adapter's, what of a fused layer is a module's, and which inputs are dropped."""

from __future__ import annotations

import pytest
import torch

from rl_backend.primitive.adapters import (
    AdapterRun,
    Columns,
    Factors,
    OwnHead,
    adapters_at_work,
    dropped,
    runs_at_work,
    runs_of_share,
    split_by_adapter,
)


def factors(dropout: float, seed: int = 3) -> Factors:
    a, b = torch.zeros(2, 5), torch.zeros(4, 2)
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 1.0, dropout, seed)


def test_columns_of_a_module_are_a_view_of_a_part_of_every_group() -> None:
    y = torch.arange(2 * 12.0).view(2, 12)
    part = Columns(3, 1, 3).of(y)
    assert part.tolist() == [[[1, 2], [5, 6], [9, 10]], [[13, 14], [17, 18], [21, 22]]]
    part.zero_()
    assert y[1].tolist() == [12, 0, 0, 15, 16, 0, 0, 19, 20, 0, 0, 23]


def test_the_innermost_adapters_are_at_work_and_those_before_return_even_after_an_error() -> None:
    outer, inner = [AdapterRun(0, 1, {})], [AdapterRun(1, 3, {})]
    assert runs_at_work() == ()
    with adapters_at_work(outer):
        with pytest.raises(KeyError, match="True"), adapters_at_work(inner):
            raise KeyError(runs_at_work() is inner)
        assert runs_at_work() is outer
        with adapters_at_work(()):
            assert runs_at_work() == ()
        assert runs_at_work() is outer
    assert runs_at_work() == ()


def test_a_share_keeps_everything_but_places_and_draws() -> None:
    weight = torch.zeros(1, 4)
    head = OwnHead(weight, weight[0], weight, weight[0])
    modules, of_experts = {"q_proj": factors(0.0)}, {5: {"up_proj": factors(0.0)}}
    whole = AdapterRun(3, 9, modules, 7, head, 5, of_experts)
    shares = [runs_of_share([whole, AdapterRun(9, 12, {})], 4, rank, 3) for rank in range(3)]
    assert [[(run.start, run.stop, run.draw) for run in share] for share in shares] == [
        [(3, 4, 21)],
        [(0, 4, 22)],
        [(0, 1, 23), (1, 4, None)],
    ]
    for share in shares:
        first = share[0]
        assert (first.modules, first.head, first.key, first.of_experts) == (modules, head, 5, of_experts)
    assert (whole.start, whole.stop, whole.draw) == (3, 9, 7)
    # A first draw is one, though it is 0.
    assert [run.draw for run in runs_of_share([AdapterRun(0, 4, {}, draw=0)], 2, 1, 2)] == [1]


@pytest.mark.parametrize(
    ("edges", "rows", "expected"),
    [
        ([], 3, [(0, 3, None)]),
        ([], 0, []),
        ([(0, 4)], 4, [(0, 4, 0)]),
        ([(0, 0), (0, 2), (2, 2), (2, 5)], 6, [(0, 2, 1), (2, 5, 3), (5, 6, None)]),
        ([(1, 2), (4, 5)], 5, [(0, 1, None), (1, 2, 0), (2, 4, None), (4, 5, 1)]),
    ],
)
def test_rows_are_split_at_the_ends_of_adapters(
    edges: list[tuple[int, int]], rows: int, expected: list[tuple[int, int, int | None]]
) -> None:
    runs = [AdapterRun(start, stop, {}, key=key) for key, (start, stop) in enumerate(edges)]
    found = [(part.start, part.stop, None if run is None else run.key) for part, run in split_by_adapter(runs, rows)]
    assert found == expected


def test_a_draw_and_a_module_drop_the_same_inputs_each_time_and_others_other_ones() -> None:
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    masks = {(draw, seed): dropped(x, draw, factors(0.3, seed)) != 0 for draw in (0, 1, 2) for seed in (0, 1, 2, 2**62 + 7)}
    assert torch.equal(x, before)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for (draw, seed), mask in masks.items():
        kept = dropped(x, draw, factors(0.3, seed))
        torch.testing.assert_close(kept, torch.where(mask, x / 0.7, 0.0))
        assert torch.equal(dropped(x.double(), draw, factors(0.3, seed)) != 0, mask)
    assert torch.equal(torch.get_rng_state(), state), "the generator of the process is left alone"
    different = {tuple(mask.flatten().tolist()) for mask in masks.values()}
    assert len(different) == len(masks)


def test_nothing_is_dropped_without_a_draw_or_a_share() -> None:
    x = torch.randn(3, 5)
    assert dropped(x, None, factors(0.5)) is x
    assert dropped(x, 4, factors(0.0)) is x
    assert dropped(x, 0, factors(0.9)) is not x


def test_rows_behind_a_run_without_rows_are_nobodys() -> None:
    runs = [AdapterRun(0, 3, {}, key=0), AdapterRun(3, 3, {}, key=1)]
    found = [(rows.start, rows.stop, None if run is None else run.key) for rows, run in split_by_adapter(runs, 6)]
    assert found == [(0, 3, 0), (3, 6, None)]
