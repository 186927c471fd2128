"""Heads of LoRA tenants: whose rows have values, whose have log-probs, and where gradients go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.adapters import AdapterRun, OwnHead
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants

HIDDEN = 6


def head(seed: int) -> OwnHead:
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(1, HIDDEN, generator=generator), torch.randn(1, generator=generator)
    return OwnHead(weight, bias, torch.zeros_like(weight), torch.zeros_like(bias))


def runs(*heads: OwnHead | None) -> list[AdapterRun]:
    """Of three rows each, after one row of nobody."""
    return [AdapterRun(1 + 3 * index, 4 + 3 * index, {}, head=each) for index, each in enumerate(heads)]


def test_rows_with_values_have_no_labels_and_those_of_the_batch_stay() -> None:
    labels = torch.arange(12)
    before = labels.clone()
    expected = torch.tensor([0, -100, -100, -100, 4, 5, 6, -100, -100, -100, 10, 11])
    for _ in range(2):
        assert torch.equal(labels_without_values(labels, runs(head(1), None, head(2))), expected)
        assert torch.equal(labels, before)
    assert torch.equal(labels_without_values(labels, runs(None, None)), before)


@pytest.mark.parametrize("counts", [True, False])
def test_values_and_gradients_are_those_of_each_head_by_itself(counts: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, others = (torch.randn(shape, generator=generator) for shape in ((12, HIDDEN), (12,)))
    factors = torch.randn(12, generator=generator)
    heads = [head(1), head(2)]
    at_work = runs(heads[0], None, heads[1])
    leaves = hidden.clone().requires_grad_(), others.clone().requires_grad_()
    # Twice: gradients are added up.
    for _ in range(2):
        values = values_of_tenants(*leaves, at_work, counts=counts)
        (values * factors).sum().backward()
    grad_hidden, grad_others = leaves[0].grad, leaves[1].grad
    assert grad_hidden is not None and grad_others is not None
    has_values = torch.zeros(12, dtype=torch.bool)
    for run in at_work:
        if run.head is None:
            continue
        rows = slice(run.start, run.stop)
        has_values[rows] = True
        alone = ValueHead(HIDDEN)
        with torch.no_grad():
            alone.weight.copy_(run.head.weight)
            alone.bias.copy_(run.head.bias)
        own = hidden[rows].clone().requires_grad_()
        expected: Tensor = alone(own)
        (expected * factors[rows]).sum().backward()
        assert own.grad is not None and alone.weight.grad is not None and alone.bias.grad is not None
        torch.testing.assert_close(values[rows], expected)
        torch.testing.assert_close(grad_hidden[rows], 2 * own.grad)
        torch.testing.assert_close(run.head.grad_weight, 2.0 * counts * alone.weight.grad)
        torch.testing.assert_close(run.head.grad_bias, 2.0 * counts * alone.bias.grad)
    assert torch.equal(values[~has_values], others[~has_values])
    assert not grad_hidden[~has_values].any() and not grad_others[has_values].any()
    assert torch.equal(grad_others[~has_values], 2 * factors[~has_values])


def test_without_a_tenant_that_has_a_head_the_others_are_the_values() -> None:
    others = torch.zeros(12)
    assert values_of_tenants(torch.zeros(12, HIDDEN), others, runs(None, None)) is others


def test_rows_with_values_have_none_of_several_labels() -> None:
    labels = torch.arange(24).view(12, 2)
    found = labels_without_values(labels, runs(None, head(1)))
    assert found.tolist() == [[-100, -100] if 4 <= row < 7 else [2 * row, 2 * row + 1] for row in range(12)]
    assert torch.equal(labels, torch.arange(24).view(12, 2))


def test_values_are_float32_or_better_whatever_the_model_is() -> None:
    generator = torch.Generator().manual_seed(0)
    alone = ValueHead(HIDDEN)
    with torch.no_grad():
        alone.weight.copy_(torch.randn(1, HIDDEN, generator=generator))
        alone.bias.fill_(0.3)
    hidden = torch.randn(9, HIDDEN, generator=generator)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        module = ValueHead(HIDDEN).to(dtype)
        module.load_state_dict(alone.state_dict())
        x = hidden.to(dtype)
        found = module(x)
        assert found.shape == (9,) and found.dtype == wide
        expected = (x.double() * module.weight[0].double()).sum(-1) + module.bias.double()
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_tenants_heads_of_a_bfloat16_model_have_float32_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rounded = torch.randn(12, HIDDEN, generator=generator).bfloat16().requires_grad_()
    wide = rounded.detach().float().requires_grad_()
    heads, results = [head(1), head(1)], []
    for hidden, own in zip((rounded, wide), heads, strict=True):
        values = values_of_tenants(hidden, torch.zeros(12), runs(None, own))
        (values * torch.arange(12.0)).sum().backward()
        results.append((values, own.grad_weight, own.grad_bias))
    assert results[0][0].dtype == torch.float32
    torch.testing.assert_close(results[0], results[1])
    assert rounded.grad is not None and wide.grad is not None and rounded.grad.dtype == torch.bfloat16
    assert torch.equal(rounded.grad, wide.grad.bfloat16())
