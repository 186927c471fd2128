"""Adapters of embeddings and heads in other dtypes, without gradients, and rows of heads with gaps."""

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
    parts_of_head,
)

WORDS, HIDDEN = 7, 5


def factors(inputs: int, scale: float = 0.5) -> Factors:
    generator = torch.Generator().manual_seed(inputs)
    a, b = (torch.randn(shape, generator=generator) for shape in ((3, inputs), (HIDDEN, 3)))
    return Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale, 0.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_embedding_of_another_dtype_has_factors_in_float32(dtype: torch.dtype) -> None:
    weight = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens, mine = torch.tensor([4, 0, 4, 6, 6]), factors(WORDS)
    before = weight.clone()
    mix = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    with adapters_at_work([AdapterRun(1, 4, {"embed": mine})]):
        found = adapted_embedding(tokens, weight, "embed")
        with torch.no_grad():
            assert not adapted_embedding(tokens, weight, "embed").requires_grad
    (found * mix).sum().backward()
    a, b = mine.a.clone().requires_grad_(), mine.b.clone().requires_grad_()
    expected = weight[tokens].float()
    change = 0.5 * a.t()[tokens[1:4]] @ b.t()
    (change * mix[1:4].float()).sum().backward()
    expected[1:4] += change.detach()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert found.dtype == dtype and torch.equal(weight, before)
    torch.testing.assert_close(found.detach().float(), expected, atol=tolerance, rtol=tolerance)
    for gradient, leaf in ((mine.grad_a, a), (mine.grad_b, b)):
        assert leaf.grad is not None and gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, leaf.grad, atol=tolerance, rtol=tolerance)


def test_what_is_narrowed_in_bfloat16_has_gradients_in_float32() -> None:
    mine = factors(HIDDEN, 2.0)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    found = Narrowed.apply(x, None, mine)
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), 2.0 * x.float() @ mine.a.t(), atol=0.1, rtol=0.05)
    torch.testing.assert_close(mine.grad_a, 2.0 * x.detach().float().sum(0).expand(3, -1), atol=0.1, rtol=0.05)
    torch.testing.assert_close(x.grad.float(), 2.0 * mine.a.sum(0).expand(6, -1), atol=0.1, rtol=0.05)


@pytest.mark.parametrize(
    ("edges", "rows", "expected"),
    [
        ([(0, 4)], 4, [(0, 4, 0)]),
        ([(0, 2), (2, 4)], 4, [(0, 2, 0), (2, 4, 1)]),
        ([(1, 2), (4, 5)], 6, [(0, 1, None), (1, 2, 0), (2, 4, None), (4, 5, 1), (5, 6, None)]),
        ([], 3, [(0, 3, None)]),
        ([(0, 0)], 0, [(0, 0, None)]),
    ],
)
def test_rows_without_an_adapter_of_the_head_are_computed_together(
    edges: list[tuple[int, int]], rows: int, expected: list[tuple[int, int, int | None]]
) -> None:
    held = {HEAD: factors(HIDDEN)}
    runs = [AdapterRun(start, stop, held, key=key) for key, (start, stop) in enumerate(edges)]
    found = [(part.start, part.stop, None if run is None else run.key) for part, run in parts_of_head(runs, rows)]
    assert found == expected
