"""Gradients of weights that are put off, and the layers that take part."""

from __future__ import annotations

import torch
from torch import nn

from rl_backend.model.mixers.mla import _Float32Linear
from rl_backend.primitive.backward import put_off_in_linear_layers, put_off_weight_gradients
from rl_backend.primitive.value_head import ValueHead


def test_linear_layers_put_their_weights_off_and_compute_the_same() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 3), torch.randn(4, 5, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
    put_off_in_linear_layers(nn.Sequential(layer))
    with put_off_weight_gradients() as later:
        layer(x).square().sum().backward()
    assert layer.weight.grad is None and len(later) == 1
    later.compute()
    torch.testing.assert_close((x.grad, layer.weight.grad), expected)


def test_layers_that_compute_something_of_their_own_are_left_alone() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([ValueHead(5), _Float32Linear(5, 3, bias=False)]).to(torch.bfloat16)
    nn.init.normal_(layers[0].weight)
    x = torch.randn(4, 5).bfloat16()
    expected = [layer(x) for layer in layers]
    put_off_in_linear_layers(layers)
    for layer, right in zip(layers, expected, strict=True):
        found = layer(x)
        assert found.dtype == torch.float32
        assert torch.equal(found, right)
