"""Normalisation and rotary embedding against their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rl_backend.primitive.norm import LayerNorm, NormSpec, RMSNorm
from rl_backend.primitive.rope import Rotary, apply_rotary, rotary_cos_sin


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 16)])
def test_rms_norm_equals_its_definition_forward_and_backward(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, mix = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    norm = RMSNorm(16, 1e-5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(16, generator=generator))
    x.requires_grad_()
    reference = F.rms_norm(x, (16,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), reference)
    expected = torch.autograd.grad((reference * mix).sum(), (x, norm.weight))
    torch.testing.assert_close(torch.autograd.grad((norm(x) * mix).sum(), (x, norm.weight)), expected)


def test_rms_norm_computes_bfloat16_in_float32() -> None:
    x = 100.0 * torch.randn(4, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    norm = RMSNorm(64, 1e-6).bfloat16()
    out = norm(x)
    out.float().square().sum().backward()
    assert out.dtype == x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16
    exact = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
    torch.testing.assert_close(out.float(), exact, atol=0, rtol=2**-7)


def test_rotary_embedding_rotates_pairs_of_halves_by_position_times_frequency() -> None:
    positions = torch.tensor([0, 5, 1])
    cos, sin = rotary_cos_sin(positions, Rotary(4, 100.0), torch.float64)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    out = apply_rotary(x, cos, sin)
    frequencies = torch.tensor([1.0, 0.1], dtype=torch.float64)
    turned = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(
        torch.ones(3, 1, 2, dtype=torch.float64), positions[:, None, None] * frequencies
    )
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-6)
    assert torch.equal(out[0], x[0])


def test_rotary_gradient_is_the_rotation_back() -> None:
    cos, sin = rotary_cos_sin(torch.arange(6), Rotary(8, 1e4), torch.float64)
    x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: apply_rotary(value, cos, sin), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_stored_from_one_is_the_other_with_one_added_to_its_weight(kind: Any, dtype: torch.dtype) -> None:
    plain, stored = (NormSpec(1e-6, kind, from_one, bias=kind == "layer").build(8).to(dtype) for from_one in (False, True))
    assert isinstance(plain, LayerNorm if kind == "layer" else RMSNorm)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(plain(x), stored(x))
    with torch.no_grad():
        plain.weight.add_(0.25)
        stored.weight.add_(0.25)
    outputs = [module(x) for module in (plain, stored)]
    assert outputs[0].dtype == dtype
    assert torch.equal(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), module.weight)
        for output, module in zip(outputs, (plain, stored), strict=True)
    ]
    assert torch.equal(*gradients[0], *gradients[1])
