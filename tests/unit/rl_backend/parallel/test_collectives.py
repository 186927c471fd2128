"""Collectives and their backward passes, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel import collectives
from rl_backend.parallel.collectives import all_gather, all_reduce, all_to_all_rows, reduce_scatter, sum_over
from tests.support.rank_threads import run_ranks

RANKS = (1, 2, 3)
"""With more than two the order of a sum is made that of the ranks."""


def rows(rank: int, count: int = 6) -> Tensor:
    """(count, 2, 3), of no two ranks alike, and not in the order of memory."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3, count, 2, generator=generator, dtype=torch.float64).permute(1, 2, 0).requires_grad_()


def weight(rank: int, like: Tensor) -> Tensor:
    """What a rank's loss multiplies its outputs by."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(100 + rank), dtype=like.dtype)


def run(collective: Callable[[Tensor, dist.ProcessGroup], Tensor], ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Output and gradient of the input on each rank, each of which has a loss of its own."""

    def on_rank(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        x = rows(group.rank())
        before = x.detach().clone()
        output = collective(x, group)
        (gradient,) = torch.autograd.grad((output * weight(group.rank(), output)).sum(), x)
        assert torch.equal(x, before)
        return output.detach(), gradient

    return run_ranks(on_rank, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("sum_gradients", [True, False])
def test_gathered_rows_give_back_their_gradients(ranks: int, sum_gradients: bool) -> None:
    found = run(lambda x, group: all_gather(x, group, sum_gradients=sum_gradients), ranks)
    whole = torch.cat([rows(rank).detach() for rank in range(ranks)])
    weights = [weight(rank, whole) for rank in range(ranks)]
    for rank, (output, gradient) in enumerate(found):
        assert torch.equal(output, whole)
        of_all = torch.stack(weights).sum(0) if sum_gradients else weights[rank]
        torch.testing.assert_close(gradient, of_all[6 * rank : 6 * (rank + 1)])


@pytest.mark.parametrize("ranks", RANKS)
def test_scattered_sums_gather_their_gradients(ranks: int) -> None:
    found = run(reduce_scatter, ranks)
    total, mine = torch.stack([rows(rank).detach() for rank in range(ranks)]).sum(0), 6 // ranks
    of_all = torch.cat([weight(rank, total[:mine]) for rank in range(ranks)])
    for rank, (output, gradient) in enumerate(found):
        torch.testing.assert_close(output, total[mine * rank : mine * (rank + 1)])
        torch.testing.assert_close(gradient, of_all)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sum_adds_up_numbers_and_gradients(ranks: int) -> None:
    total = torch.stack([rows(rank).detach() for rank in range(ranks)]).sum(0)
    weights = torch.stack([weight(rank, total) for rank in range(ranks)]).sum(0)
    for output, gradient in run(all_reduce, ranks):
        torch.testing.assert_close(output, total)
        torch.testing.assert_close(gradient, weights)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)], ids=str)
def test_a_small_tensor_is_added_up_in_place(ranks: int, shape: tuple[int, ...]) -> None:
    def on_rank(group: dist.ProcessGroup) -> Tensor:
        x = torch.full(shape, 10.0 ** group.rank())
        assert sum_over(group)(x) is None
        return x

    for found in run_ranks(on_rank, ranks):
        assert torch.equal(found, torch.full(shape, (1.0, 11.0, 111.0)[ranks - 1]))


def test_more_than_two_ranks_are_added_up_in_their_order() -> None:
    # In float32, 1e8 + 1 - 1e8 is 0 in this order and 1 in others.
    parts = (1e8, 1.0, -1e8)

    def on_rank(group: dist.ProcessGroup) -> tuple[float, float, float]:
        x = torch.full((3, 2), parts[group.rank()])
        small = x.clone()
        sum_over(group)(small)
        return small[0, 0].item(), all_reduce(x, group)[1, 1].item(), reduce_scatter(x, group)[0, 1].item()

    assert run_ranks(on_rank, 3) == [(0.0, 0.0, 0.0)] * 3


def test_the_order_of_a_sum_is_made_that_of_the_ranks_only_where_it_varies() -> None:
    for ranks, varies in ((1, False), (2, False), (3, True)):
        assert run_ranks(lambda group: collectives._order_varies(torch.zeros(1), group), ranks) == [varies] * ranks
    assert run_ranks(lambda group: collectives._order_varies(torch.zeros(1, device="meta"), group), 3) == [False] * 3


SENT = [[1, 0, 3], [2, 2, 0], [0, 0, 0]]
"""Rows from each rank to each; the last sends none."""


def test_rows_go_to_their_ranks_and_gradients_the_way_back() -> None:
    def on_rank(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
        rank = group.rank()
        sent, received = SENT[rank], [row[rank] for row in SENT]
        x = rows(rank, sum(sent))
        output = all_to_all_rows(x, tuple(sent), tuple(received), group)
        (gradient,) = torch.autograd.grad((output * weight(rank, output)).sum(), x)
        return x.detach(), output.detach(), gradient

    found = run_ranks(on_rank, 3)
    parts = [x.split(sent) for (x, _, _), sent in zip(found, SENT, strict=True)]
    weights = [weight(rank, output) for rank, (_, output, _) in enumerate(found)]
    back = [each.split([row[rank] for row in SENT]) for rank, each in enumerate(weights)]
    for rank, (_, output, gradient) in enumerate(found):
        assert torch.equal(output, torch.cat([part[rank] for part in parts]))
        torch.testing.assert_close(gradient, torch.cat([each[rank] for each in back]))


OPERATORS: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "gather": lambda x, group: all_gather(x, group, sum_gradients=True),
    "gather same": lambda x, group: all_gather(x, group, sum_gradients=False),
    "scatter": reduce_scatter,
    "sum": all_reduce,
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", OPERATORS)
def test_the_operator_of_compiled_code_is_the_collective_with_its_gradient(
    monkeypatch: pytest.MonkeyPatch, how: str, ranks: int
) -> None:
    by_name: dict[str, dist.ProcessGroup] = {}
    monkeypatch.setattr(collectives, "_group_named", by_name.__getitem__)

    def operator(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        by_name[f"{how} {group.rank()}"] = group
        found: Tensor = torch.ops.rl_backend.over_ranks(x, how, f"{how} {group.rank()}")
        return found

    for mine, other in zip(run(operator, ranks), run(OPERATORS[how], ranks), strict=True):
        torch.testing.assert_close(mine, other)


def test_compiled_code_knows_how_many_rows_a_collective_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_group_named", lambda name: SimpleNamespace(size=lambda: 3))
    x = torch.empty(6, 2, 5, device="meta")
    for how, expected in (("gather", 18), ("gather same", 18), ("scatter", 2), ("own", 2), ("sum", 6)):
        assert torch.ops.rl_backend.over_ranks(x, how, "three").shape == (expected, 2, 5)
