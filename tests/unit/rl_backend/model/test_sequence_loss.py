"""The balancing loss of each sequence by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.router import (
    RouterLossCoefficients,
    RouterSettings,
    Routing,
    RowSequences,
    sequence_balancing_loss,
    with_router_losses,
)

LENGTHS, EXPERTS, TOP_K = (5, 1, 9), 6, 2


def by_the_paper(logits: Tensor, score: str) -> Tensor:
    """Of one sequence, token by token (arXiv 2412.19437, equations 17 to 20, without alpha)."""
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    shares, total = scores / scores.sum(-1, keepdim=True), logits.new_zeros(())
    for expert in range(EXPERTS):
        chosen = sum(expert in row for row in scores.topk(TOP_K).indices.tolist())
        fraction = EXPERTS / (TOP_K * len(logits)) * chosen
        total = total + fraction * shares[:, expert].mean()
    return total


@pytest.mark.shows(
    "model: DeepSeek-V3's balancing loss of each sequence equals its equations, and sees neither bias nor padding"
)
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
def test_the_loss_is_the_mean_over_sequences_of_the_papers(score: str) -> None:
    settings = RouterSettings(EXPERTS, TOP_K, score, expert_bias=True, groups=3, chosen_groups=1)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(sum(LENGTHS), EXPERTS, dtype=torch.float64, generator=generator, requires_grad=True)
    expected = torch.stack([by_the_paper(rows, score) for rows in logits.split(LENGTHS)]).mean()
    of_rows = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))
    sequences = RowSequences(of_rows, 3)
    found = sequence_balancing_loss(logits, settings, sequences)
    torch.testing.assert_close(found, expected)
    gradient = torch.autograd.grad(expected, logits)[0]
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], gradient)

    # Padding between the sequences and behind them, of one and of none.
    places = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    padded = torch.randn(18, EXPERTS, dtype=torch.float64, generator=generator).index_copy(0, torch.tensor(places), logits)
    padding = torch.ones(18, dtype=torch.bool).index_fill(0, torch.tensor(places), False)
    rows = torch.zeros(18, dtype=torch.int64).index_copy(0, torch.tensor(places), of_rows)
    padded_loss = sequence_balancing_loss(
        padded, settings, RowSequences(rows.index_fill(0, torch.tensor([17]), 7), 3), padding
    )
    torch.testing.assert_close(padded_loss, expected)


def test_the_loss_enters_the_gradients_with_its_coefficient_and_that_of_the_micro_batch() -> None:
    settings = RouterSettings(EXPERTS, TOP_K, "sigmoid")
    logits = torch.randn(7, EXPERTS, dtype=torch.float64, requires_grad=True)
    routing = Routing(logits.topk(TOP_K).indices, logits.topk(TOP_K).values, logits)
    sequences = RowSequences(torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2)
    lossy = with_router_losses(routing, settings, RouterLossCoefficients(sequence=0.4), 0.5, sequences=sequences)
    assert torch.equal(lossy.weights, routing.weights)
    plain = routing.weights.sum() + 0.5 * 0.4 * sequence_balancing_loss(logits, settings, sequences)
    expected = torch.autograd.grad(plain, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(lossy.weights.sum(), logits)[0], expected)
