"""Tokens travel to their experts and back, with ranks as threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.parallel.expert import AllToAllDispatcher
from rl_backend.primitive.experts import RowOwners
from rl_backend.primitive.router import Routing
from tests.support.rank_threads import run_ranks

EXPERTS, HIDDEN, TOP_K = 4, 3, 2
TOKENS = (3, 0, 5, 2)
"""Of each rank; one has none."""


def scale(expert: int) -> Tensor:
    """What an expert multiplies its inputs by."""
    return torch.arange(1.0, HIDDEN + 1, dtype=torch.float64) + 10 * expert


def inputs(rank: int) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=generator, dtype=torch.float64)
    scores = torch.rand(TOKENS[rank], EXPERTS, generator=generator, dtype=torch.float64)
    # Nobody chooses the last but one.
    scores[:, 2] = -1.0
    weights, experts = scores.topk(TOP_K)
    return x.requires_grad_(), Routing(experts, weights.requires_grad_(), scores)


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
def test_a_token_gets_the_weighted_sum_of_its_experts_and_gradients_come_back(ep: int, etp: int) -> None:
    def on_rank(group: dist.ProcessGroup) -> tuple[Any, ...]:
        rank = group.rank()
        dispatch = AllToAllDispatcher(group, EXPERTS, ep, etp)
        x, routing = inputs(rank)
        found = dispatch(x, routing)
        first = rank // etp * (EXPERTS // ep)
        scales = torch.stack([scale(first + number) for number in range(EXPERTS // ep)])
        # A part of an expert returns a part of the sum.
        share = (1.0 + rank % etp) / sum(1.0 + part for part in range(etp))
        results = found.rows * scales.repeat_interleave(found.counts, 0) * found.weights[:, None] * share
        output = found.combine(results)
        gradients = torch.autograd.grad(output.square().sum(), (x, routing.weights))
        return output.detach(), found.counts.tolist(), found.rows.detach(), found.adapters, *gradients

    ranks = ep * etp
    answers = run_ranks(on_rank, ranks)
    counts = torch.zeros(EXPERTS, dtype=torch.int64)
    for rank, (output, *_, x_gradient, weight_gradient) in enumerate(answers):
        x, routing = inputs(rank)
        scales = torch.stack([scale(number) for number in range(EXPERTS)])
        expected = (x[:, None] * scales[routing.experts] * routing.weights[..., None]).sum(1)
        torch.testing.assert_close(output, expected.detach())
        gradients = torch.autograd.grad(expected.square().sum(), (x, routing.weights))
        torch.testing.assert_close((x_gradient, weight_gradient), gradients)
        counts += routing.experts.flatten().bincount(minlength=EXPERTS)
    for rank, (_, found, rows, adapters, *_) in enumerate(answers):
        first = rank // etp * (EXPERTS // ep)
        assert found == counts[first : first + EXPERTS // ep].tolist() and adapters == ()
        # The rows of an expert are in the order of the sending ranks and their tokens.
        expected_rows = [
            x[token : token + 1]
            for expert in range(first, first + EXPERTS // ep)
            for source in range(ranks)
            for x, routing in [inputs(source)]
            for token in range(TOKENS[source])
            if expert in routing.experts[token]
        ]
        assert torch.equal(rows, torch.cat([rows[:0], *expected_rows]).detach())


def test_a_dispatcher_knows_its_sizes() -> None:
    group: Any = SimpleNamespace(size=lambda: 6)
    made = AllToAllDispatcher(group, 12, 3, 2)
    assert (made.group, made.num_experts, made.ep_size, made.etp_size) == (group, 12, 3, 2)
    assert AllToAllDispatcher(group, 12, 6).etp_size == 1


def test_rows_of_an_adapter_keep_the_draw_of_the_rank_that_sent_them() -> None:
    """Dropout is drawn by each rank for its own tokens; one that has no row of the adapter draws nothing."""
    tokens, draws = (3, 2, 1), ([5, -1], [9, 4], [-1, 7])

    def on_rank(group: dist.ProcessGroup) -> list[tuple[int, tuple[int, int, int | None]]]:
        rank = group.rank()
        # Every token chooses the experts of the first two ranks; a rank has tokens of one adapter.
        chosen = torch.tensor([[0, 1]] * tokens[rank])
        owner = 1 if rank == 2 else 0
        owners = RowOwners(torch.full((tokens[rank],), owner), [11, 12], [{}, {}], draws[rank])
        x = torch.zeros(tokens[rank], HIDDEN, dtype=torch.float64)
        routing = Routing(chosen, torch.ones(tokens[rank], 2, dtype=torch.float64), x)
        found = AllToAllDispatcher(group, 3, 3)(x, routing, owners)
        return [(expert, (run.start, run.stop, run.draw)) for expert, run in found.adapters]

    answers = run_ranks(on_rank, 3)
    runs = [(0, (0, 3, 5)), (0, (3, 5, 9)), (0, (5, 6, 7))]
    assert answers == [runs, runs, []]
