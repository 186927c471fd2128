"""Losses of routers against loops over tokens: padding, sequences, ranks that share tokens, and each coefficient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.router import (
    RouterLossCoefficients,
    RouterSettings,
    Routing,
    RowSequences,
    choose_experts,
    expert_use,
    expert_weights,
    load_balancing_loss,
    router_z_loss,
    sequence_balancing_loss,
    with_router_losses,
)

EXPERTS, TOP_K, TOKENS = 5, 2, 12
PADDING = torch.tensor([0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
OF_ROWS = torch.tensor([0, 0, 9, 0, 1, 1, 1, -3, 2, 2, 2, 7])
"""Three sequences; padding has any number."""
KINDS: list[Any] = ["softmax", "sigmoid"]


def logits_of(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def settings_of(score: Any) -> RouterSettings:
    return RouterSettings(EXPERTS, TOP_K, score, normalise=True)


def routed(logits: Tensor, settings: RouterSettings) -> Routing:
    experts = choose_experts(logits, settings)
    return Routing(experts, expert_weights(logits, experts, settings), logits)


def shares(logits: Tensor, score: str) -> Tensor:
    scores = logits.exp() if score == "softmax" else 1 / (1 + (-logits).exp())
    return scores / scores.sum(-1, keepdim=True)


def balance(logits: Tensor, rows: Sequence[int], score: str) -> Tensor:
    """``E * sum_e f_e * P_e`` over some tokens."""
    chosen = [expert for row in rows for expert in logits[row].topk(TOP_K).indices.tolist()]
    fractions = torch.tensor([chosen.count(expert) / (TOP_K * len(rows)) for expert in range(EXPERTS)])
    means = torch.stack([shares(logits[row], score) for row in rows]).mean(0)
    return EXPERTS * (fractions.to(means.dtype) * means).sum()


def z_loss(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return torch.stack([logits[row].exp().sum().log() ** 2 for row in rows]).mean()


def counted(padding: Tensor | None) -> list[int]:
    return [row for row in range(TOKENS) if padding is None or not padding[row]]


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("score", KINDS)
def test_losses_and_gradients_are_those_of_the_definitions(score: Any, padding: Tensor | None) -> None:
    settings, logits = settings_of(score), logits_of()
    rows, of_rows = counted(padding), OF_ROWS if padding is not None else torch.arange(TOKENS) // 4
    by_sequence = [[row for row in rows if of_rows[row] == number] for number in range(3)]
    pairs = [
        (load_balancing_loss(routed(logits, settings), settings, padding), balance(logits, rows, score)),
        (router_z_loss(logits, padding), z_loss(logits, rows)),
        (
            sequence_balancing_loss(logits, settings, RowSequences(of_rows, 3), padding),
            torch.stack([balance(logits, each, score) for each in by_sequence]).mean(),
        ),
    ]
    for found, expected in pairs:
        assert found.dim() == 0
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_a_sequence_is_balanced_by_its_highest_scores_and_not_by_what_was_chosen() -> None:
    """A bias changes choices, and groups hide experts."""
    logits = logits_of()
    plain = RouterSettings(EXPERTS, TOP_K, "sigmoid")
    sequences = RowSequences(torch.arange(TOKENS) // 4, 3)
    expected = sequence_balancing_loss(logits, plain, sequences)
    biased = RouterSettings(EXPERTS, TOP_K, "sigmoid", expert_bias=True, scaling_factor=3.0)
    torch.testing.assert_close(sequence_balancing_loss(logits, biased, sequences), expected)
    # Unlike it, the balance of a micro-batch is by choices.
    other = Routing(torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.ones(TOKENS, TOP_K), logits)
    scores = shares(logits, "sigmoid")[:, 0].mean() * EXPERTS
    torch.testing.assert_close(load_balancing_loss(other, plain), scores)


def in_parts(compute: Callable[[slice, Callable[[Tensor], object]], Any]) -> list[Any]:
    """What two ranks compute of 7 and 5 tokens: each gets the sums of both."""
    parts, given = (slice(0, 7), slice(7, TOKENS)), list[list[Tensor]]()
    for part in parts:
        mine: list[Tensor] = []
        compute(part, lambda tensor, mine=mine: mine.append(tensor.clone()))  # type: ignore[misc]
        given.append(mine)
    results = []
    for index, part in enumerate(parts):
        others = iter(given[1 - index])
        results.append(compute(part, lambda tensor, others=others: tensor.add_(next(others))))  # type: ignore[misc]
    return results


@pytest.mark.parametrize("score", KINDS)
def test_shares_of_ranks_add_up_to_the_loss_of_the_whole_micro_batch(score: Any) -> None:
    settings, logits = settings_of(score), logits_of()
    routing = routed(logits, settings)

    def cut(part: slice) -> Routing:
        return Routing(*(each[part] for each in routing))

    def whole_batch(part: slice, add: Callable[[Tensor], object]) -> tuple[Tensor, Tensor]:
        use = expert_use(routing.experts[part], EXPERTS, PADDING[part], add)
        return load_balancing_loss(cut(part), settings, PADDING[part], use), router_z_loss(logits[part], PADDING[part], use)

    def by_sequence(part: slice, add: Callable[[Tensor], object]) -> Tensor:
        return sequence_balancing_loss(logits[part], settings, RowSequences(OF_ROWS[part], 3), PADDING[part], add)

    balances, z_losses = zip(*in_parts(whole_batch), strict=True)
    for found, expected in (
        (sum(balances), load_balancing_loss(routing, settings, PADDING)),
        (sum(z_losses), router_z_loss(logits, PADDING)),
        (sum(in_parts(by_sequence)), sequence_balancing_loss(logits, settings, RowSequences(OF_ROWS, 3), PADDING)),
    ):
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("coefficients", [(0.3, 0.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.5), (0.3, 0.2, 0.5)], ids=str)
@pytest.mark.parametrize("sequences", [None, RowSequences(OF_ROWS, 3)], ids=["one", "three"])
def test_weights_bring_each_loss_into_the_gradients_alone(
    coefficients: tuple[float, float, float], sequences: RowSequences | None
) -> None:
    settings, logits = settings_of("sigmoid"), logits_of()
    routing = routed(logits, settings)
    found = with_router_losses(routing, settings, RouterLossCoefficients(*coefficients), 0.25, PADDING, sequences=sequences)
    assert torch.equal(found.weights, routing.weights) and found.logits is routing.logits
    assert found.experts is routing.experts
    mix = torch.arange(TOKENS * TOP_K, dtype=torch.float64).view(TOKENS, TOP_K)
    rows, numbers = counted(PADDING), OF_ROWS.tolist()
    by_sequence = [rows] if sequences is None else [[row for row in rows if numbers[row] == each] for each in range(3)]
    terms = (
        balance(logits, rows, "sigmoid"),
        z_loss(logits, rows),
        torch.stack([balance(logits, each, "sigmoid") for each in by_sequence]).mean(),
    )
    losses = sum(factor * term for factor, term in zip(coefficients, terms, strict=True))
    # The loss weight is a factor of the losses alone.
    expected = torch.autograd.grad((routing.weights * mix).sum() + 0.25 * losses, logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad((found.weights * mix).sum(), logits), expected)


def test_without_coefficients_or_gradients_nothing_is_counted() -> None:
    settings, logits = settings_of("softmax"), logits_of()
    routing = routed(logits, settings)

    def refuse(_: Tensor) -> None:
        raise AssertionError("reduced")

    assert with_router_losses(routing, settings, RouterLossCoefficients(), 1.0, None, refuse) is routing
    with torch.no_grad():
        assert with_router_losses(routing, settings, RouterLossCoefficients(1.0, 1.0, 1.0), 1.0, None, refuse) is routing


def test_ranks_reduce_the_use_of_experts_once_and_that_of_sequences_once_more() -> None:
    settings, logits = settings_of("softmax"), logits_of()
    reduced: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> None:
        reduced.append(tuple(tensor.shape))

    for coefficients, expected in (
        (RouterLossCoefficients(0.1, 0.1), [(EXPERTS + 1,)]),
        (RouterLossCoefficients(0.1, 0.1, 0.1), [(EXPERTS + 1,), (3 * EXPERTS + 3,)]),
    ):
        reduced.clear()
        with_router_losses(routed(logits, settings), settings, coefficients, 1.0, PADDING, note, RowSequences(OF_ROWS, 3))
        assert reduced == expected


@pytest.mark.parametrize("coefficients", [(0.3, 0.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.5)], ids=str)
def test_a_row_of_several_tokens_counts_as_often_in_the_losses_and_padding_is_nobodys(
    coefficients: tuple[float, float, float],
) -> None:
    settings, rows = settings_of("sigmoid"), torch.tensor([0, 1, 1, 4, 0, 1, 6, 6, 6, 8])
    sequences = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2, 2])
    gradients = []
    for shared in (True, False):
        logits = logits_of()
        routing = routed(logits if shared else logits[rows], settings)
        of_rows = RowSequences(sequences, 3, rows if shared else None)
        # Rows that no token has are those that fill up.
        padding = torch.ones(TOKENS, dtype=torch.bool).index_fill(0, rows, False) if shared else None
        found = with_router_losses(routing, settings, RouterLossCoefficients(*coefficients), 0.25, padding, None, of_rows)
        assert torch.equal(found.weights, routing.weights)
        (gradient,) = torch.autograd.grad((0.0 * found.weights).sum(), logits)
        gradients.append(gradient)
    assert gradients[0].any() and not gradients[0][2].any()
    torch.testing.assert_close(*gradients)
