"""States that go along the ranks of a sequence, with every rank of a group in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.parallel import context
from rl_backend.parallel.context import RecurrenceOverRanks, lay_out_tokens
from tests.support.rank_threads import run_ranks

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
        monkeypatch.setattr(context, "all_gather", collective)
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


@pytest.mark.parametrize(
    ("ranks", "lengths", "multiple"), [(2, (9,), 1), (2, (5, 1, 30), 4), (3, (17, 40), 1), (1, (4, 3), 1)]
)
@pytest.mark.parametrize("width", [1, 3])
def test_a_segment_has_the_tokens_before_it_whichever_rank_they_are_on(
    ranks: int, lengths: Sequence[int], multiple: int, width: int
) -> None:
    """Each token's features are its sequence, counted from 1, and its place; nothing is before the first."""

    def on_rank(group: Any) -> tuple[Tensor, Tensor]:
        layout = lay_out_tokens(lengths, cp_size=ranks, cp_rank=group.rank(), multiple=multiple)
        of_token = torch.repeat_interleave(torch.arange(1, len(lengths) + 1), torch.tensor(lengths))
        x = torch.stack((layout.take(of_token, 0), layout.position_ids), dim=1).double().requires_grad_()
        found = RecurrenceOverRanks(group).history(x, width, layout.segments)
        assert found.shape == (len(layout.segments.query_lens), width, 2)
        starts = torch.tensor(layout.segments.key_lens) - torch.tensor(layout.segments.query_lens)
        for segment, start in enumerate(starts.tolist()):
            places = list(range(start - width, start))
            assert found[segment, :, 1].tolist() == [max(place, 0) for place in places]
            # The last rank has one segment of a sequence, the others two; a filler comes after them.
            number = segment // (1 if group.rank() == ranks - 1 else 2)
            of_sequence = number + 1 if number < len(lengths) else 0
            for place, row in zip(places, found[segment], strict=True):
                is_token = place >= 0 and of_sequence > 0 and place < lengths[of_sequence - 1]
                assert int(row[0]) == (of_sequence if is_token else 0)
        found.sum().backward()
        assert x.grad is not None
        return found.detach(), x.grad

    found = run_ranks(on_rank, ranks)
    # Every number that a segment was given has its gradient on the rank that the token is on.
    given = sum(int((history[..., 0] > 0).sum()) for history, _ in found)
    assert sum(float(gradient[:, 0].sum()) for _, gradient in found) >= given
