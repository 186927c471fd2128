"""Adapters beside the embedding and the head of a frozen model, against autograd."""

from __future__ import annotations

import pytest
import torch

from rl_backend.primitive.adapters import (
    HEAD,
    AdapterRun,
    Factors,
    Narrowed,
    adapted_embedding,
    adapters_at_work,
    dropped,
    parts_of_head,
)

WORDS, HIDDEN = 11, 6
NAME = "embed_tokens"


def factors(seed: int, rank: int, scale: float, dropout: float = 0.0, inputs: int = WORDS) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator) for shape in ((rank, inputs), (HIDDEN, rank)))
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, dropout, seed)


def test_tokens_of_an_embedding_have_the_products_and_gradients_of_their_own_adapter() -> None:
    """Tokens that come several times, in several adapters, behind each other and after a gap, and tokens of nobody."""
    tokens = torch.tensor([5, 5, 7, 5, 1, 5, 5, 0, 7, 2, 5, 3])
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(0))
    first, second = factors(1, 2, 0.5), factors(2, 3, 2.0)
    runs = [AdapterRun(0, 4, {NAME: first}), AdapterRun(4, 7, {NAME: second}), AdapterRun(9, 11, {NAME: first})]
    runs.insert(2, AdapterRun(7, 9, {"q_proj": second}))
    # Twice: gradients are added up.
    for _ in range(2):
        with adapters_at_work(runs):
            found = adapted_embedding(tokens, weight, NAME)
        found.square().sum().backward()
    leaves = {id(each): (each.a.clone().requires_grad_(), each.b.clone().requires_grad_()) for each in (first, second)}
    expected = weight[tokens]
    for run in runs:
        if NAME in run.modules:
            a, b = leaves[id(run.modules[NAME])]
            one_hot = torch.nn.functional.one_hot(tokens, WORDS).float()
            one_hot[: run.start] = one_hot[run.stop :] = 0.0
            expected = expected + run.modules[NAME].scale * one_hot @ a.t() @ b.t()
    expected.square().sum().backward()
    torch.testing.assert_close(found.detach(), expected.detach())
    for each in (first, second):
        for gradient, leaf in zip((each.grad_a, each.grad_b), leaves[id(each)], strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(gradient, 2 * leaf.grad)


def test_an_embedding_without_an_adapter_is_looked_up() -> None:
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([3, 3, 10])
    with adapters_at_work([AdapterRun(0, 3, {"q_proj": factors(1, 2, 1.0)})]):
        found = adapted_embedding(tokens, weight, NAME)
    assert torch.equal(found, weight[tokens]) and not found.requires_grad


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_an_adapter_of_the_head_narrows_has_the_gradients_of_autograd(dropout: float) -> None:
    mine = factors(3, 4, 0.5, dropout, inputs=HIDDEN)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
    mask = dropped(torch.ones_like(x), 7, mine)
    inputs, reference, a = x.clone().requires_grad_(), x.clone().requires_grad_(), mine.a.clone().requires_grad_()
    for _ in range(2):
        found = Narrowed.apply(inputs, 7, mine)
        found.square().sum().backward()
    expected = 0.5 * (reference * mask) @ a.t()
    expected.square().sum().backward()
    assert inputs.grad is not None and reference.grad is not None and a.grad is not None
    torch.testing.assert_close(found.detach(), expected.detach())
    torch.testing.assert_close(inputs.grad, 2 * reference.grad)
    torch.testing.assert_close(mine.grad_a, 2 * a.grad)


def test_rows_of_the_head_are_parted_where_an_adapter_has_it_alone() -> None:
    held = {HEAD: factors(1, 2, 1.0, inputs=HIDDEN)}
    first, other, last = AdapterRun(2, 5, held), AdapterRun(5, 8, {}), AdapterRun(8, 9, held)
    found = [(rows.start, rows.stop, run) for rows, run in parts_of_head([first, other, last], 12)]
    assert found == [(0, 2, None), (2, 5, first), (5, 8, None), (8, 9, last), (9, 12, None)]
    assert [(rows.start, rows.stop, run) for rows, run in parts_of_head([other], 12)] == [(0, 12, None)]
    assert [(rows.start, rows.stop, run) for rows, run in parts_of_head([], 0)] == [(0, 0, None)]
