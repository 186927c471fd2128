"""States that go along the ranks of a sequence, with every rank of a group in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.parallel import recurrence
from rl_backend.parallel.context import lay_out_tokens
from rl_backend.parallel.recurrence import RecurrenceOverRanks

HEADS, KEY, VALUE = 2, 3, 4


@pytest.mark.parametrize(
    ("ranks", "lengths", "multiple"), [(2, (9,), 1), (2, (5, 1, 30), 4), (3, (17, 40), 1), (4, (8, 3), 2)]
)
def test_states_and_gradients_are_those_of_chunks_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, ranks: int, lengths: Sequence[int], multiple: int
) -> None:
    groups: list[Any] = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: ranks) for rank in range(ranks)]
    segments = [
        lay_out_tokens(lengths, cp_size=ranks, cp_rank=rank, multiple=multiple, device=torch.device("cpu")).segments
        for rank in range(ranks)
    ]
    generator = torch.Generator().manual_seed(0)
    transitions = [
        torch.randn(
            len(each.query_lens), HEADS, KEY, KEY + VALUE, dtype=torch.float64, generator=generator, requires_grad=True
        )
        for each in segments
    ]
    sent: list[Tensor] = []

    def send(own: Tensor, group: Any, *, sum_gradients: bool) -> Tensor:
        sent.append(own)
        return torch.cat([own] * ranks)

    def receive(own: Tensor, group: Any, *, sum_gradients: bool) -> Tensor:
        # Without the sum a rank's own transitions have the gradients of its own states alone.
        return torch.cat(
            [each if sum_gradients or rank == group.rank() else each.detach() for rank, each in enumerate(sent)]
        )

    for collective in (send, receive):
        monkeypatch.setattr(recurrence, "all_gather", collective)
        found = [
            RecurrenceOverRanks(group).states(own, each)
            for group, own, each in zip(groups, transitions, segments, strict=True)
        ]
    expected = [torch.zeros_like(states) for states in found]
    for sequence in range(len(lengths)):
        # The last rank's two chunks are neighbours, and one segment.
        order = [(rank, 2 * sequence) for rank in range(ranks - 1)]
        order += [(ranks - 1, sequence), *((rank, 2 * sequence + 1) for rank in reversed(range(ranks - 1)))]
        state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
        for rank, segment in order:
            expected[rank] = expected[rank].index_put((torch.tensor(segment),), state)
            step = transitions[rank][segment]
            state = step[..., :KEY] @ state + step[..., KEY:]
    gradients = []
    weights = [torch.randn(each.shape, dtype=torch.float64, generator=generator) for each in expected]
    for states in (found, expected):
        loss = torch.stack([(each * weight).sum() for each, weight in zip(states, weights, strict=True)]).sum()
        gradients.append(torch.autograd.grad(loss, transitions, retain_graph=True))
    for mine, other in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(mine, other)
    assert all(bool(gradient.any()) for gradient in gradients[1])
