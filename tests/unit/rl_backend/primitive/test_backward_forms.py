"""Weights whose gradients wait: which pass has them, in what order they are computed, and what ends with an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rl_backend.primitive.backward import put_off_in_linear_layers, put_off_weight_gradients, weight_gradient


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    put_off_in_linear_layers(model)
    return model


def test_gradients_of_two_passes_are_added_up_in_the_end_and_biases_do_not_wait() -> None:
    model, x = model_of(), torch.randn(6, 4)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        plain(x).square().sum().backward()
        with put_off_weight_gradients() as later:
            model(x).square().sum().backward()
        assert [weight.shape for weight, _ in later] == [(3, 5), (5, 4)], "the order of the backward pass"
        before = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        later.compute()
        assert later == []
        later.compute()
    assert before[1] is not None
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_outside_of_a_pass_and_after_an_error_nothing_waits() -> None:
    weight = torch.zeros(2, requires_grad=True)

    def compute() -> Tensor:
        return torch.ones(2)

    assert weight_gradient(weight, compute) is not None
    with pytest.raises(KeyError, match="None"), put_off_weight_gradients():
        raise KeyError(str(weight_gradient(weight, compute)))
    with put_off_weight_gradients() as outer:
        with put_off_weight_gradients() as inner:
            assert weight_gradient(weight, compute) is None
        assert (len(outer), len(inner)) == (0, 1)
        assert weight_gradient(weight, compute) is None
        assert (len(outer), len(inner)) == (1, 1)
    assert weight_gradient(weight, compute) is not None
    assert weight.grad is None
    outer.compute()
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]


def test_frozen_weights_and_inputs_without_a_gradient_are_left_out() -> None:
    model = model_of()
    model[0].weight.requires_grad_(False)
    x = torch.randn(6, 4, requires_grad=True)
    with put_off_weight_gradients() as later:
        model(x).sum().backward()
    assert len(later) == 1 and x.grad is not None and model[0].bias.grad is not None
    alone = model_of()
    out = alone(torch.randn(6, 4))
    assert out.shape == (6, 3)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in alone.parameters())
