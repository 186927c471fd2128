"""Norms in every form: features that are cut over ranks, frozen weights, dtypes, weights from one, what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backend.primitive.norm import LayerNorm, NormSpec, RMSNorm

DIM = 10


def filled(norm: RMSNorm | LayerNorm) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return norm


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(1))
    x[0, 0] *= 1e-3
    return x.to(dtype).requires_grad_()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_rms_norm_and_its_gradients_are_those_of_the_definition(eps: float, from_one: bool, frozen: bool) -> None:
    norm = filled(RMSNorm(DIM, eps, from_one=from_one)).double()
    norm.weight.requires_grad_(not frozen)
    x, mix = tokens(), torch.randn(4, 3, DIM, dtype=torch.float64)
    found, expected = norm(x), rms(x, norm.weight + (1.0 if from_one else 0.0), eps)
    torch.testing.assert_close(found, expected)
    leaves = [x] if frozen else [x, norm.weight]
    gradients = [torch.autograd.grad((output * mix).sum(), leaves) for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_rows_above_a_frozen_norm_have_the_bits_that_they_have_alone() -> None:
    norm = filled(RMSNorm(64, 1e-6)).requires_grad_(False)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))

    def gradient(rows: Tensor) -> Tensor:
        rows = rows.clone().requires_grad_()
        return torch.autograd.grad(norm(rows).square().sum(), rows)[0]

    together = gradient(x)
    for rows in (slice(0, 1), slice(3, 20)):
        assert torch.equal(gradient(x[rows]), together[rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("from_one", [False, True])
def test_features_that_are_cut_over_ranks_are_normalised_together(from_one: bool, dtype: torch.dtype) -> None:
    """The first of two ranks has 4 of 10 features; the gradient of the sum goes to both."""
    whole = filled(RMSNorm(DIM, 0.1, from_one=from_one)).to(dtype)
    mine = RMSNorm(DIM, 0.1, from_one=from_one)
    mine.weight = torch.nn.Parameter(whole.weight.detach()[:4].clone())
    x = tokens(dtype)
    wide = x if dtype == torch.float64 else x.float()
    seen: list[Tensor] = []

    def add_others(squares: Tensor) -> Tensor:
        seen.append(squares)
        return squares + wide[..., 4:].square().sum(-1, keepdim=True)

    mine.sum_over_ranks = add_others
    found, expected = mine(x[..., :4]), whole(x)[..., :4]
    assert found.dtype == dtype and seen[0].shape == (4, 3, 1) and seen[0].dtype == wide.dtype
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    if dtype == torch.float64:
        gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (found, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_inputs_are_normalised_in_float32_and_rounded_once(weight_dtype: torch.dtype) -> None:
    norm, x = filled(RMSNorm(DIM, 1e-6)).to(weight_dtype), tokens(torch.bfloat16)
    found = norm(x)
    wide = x.detach().float().requires_grad_()
    weight = norm.weight.detach().float().requires_grad_()
    expected = rms(wide, weight, 1e-6)
    torch.testing.assert_close(found.float(), expected, atol=0, rtol=2**-7)
    mix = torch.randn(4, 3, DIM).bfloat16()
    of_x, of_weight = torch.autograd.grad((found * mix).sum(), (x, norm.weight))
    right = torch.autograd.grad((expected * mix.float()).sum(), (wide, weight))
    assert of_x.dtype == torch.bfloat16 and of_weight.dtype == weight_dtype
    torch.testing.assert_close(of_weight.float(), right[1], atol=0.02, rtol=0.02)
    scale = right[0].abs().amax(-1, keepdim=True)
    assert float(((of_x.float() - right[0]).abs() / scale).max()) < 0.02


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("from_one", [False, True])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_a_layer_norm_is_that_of_the_definition(bias: bool, from_one: bool, eps: float) -> None:
    norm = filled(NormSpec(eps, "layer", from_one=from_one, bias=bias).build(DIM)).double()
    x = tokens()
    weight = norm.weight + (1.0 if from_one else 0.0)
    centred = x - x.mean(-1, keepdim=True)
    expected = weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    expected = expected + norm.bias if bias else expected
    found = norm(x)
    torch.testing.assert_close(found, expected)
    leaves = (x, *norm.parameters())
    gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("spec", "parameters", "start", "said"),
    [
        (NormSpec(1e-5), ("weight",), 1.0, "RMSNorm(10, eps=1e-05)"),
        (NormSpec(1e-6, from_one=True), ("weight",), 0.0, "RMSNorm(10, eps=1e-06)"),
        (NormSpec(0.5, "layer"), ("weight",), 1.0, "LayerNorm(10, eps=0.5)"),
        (NormSpec(0.5, "layer", bias=True), ("weight", "bias"), 1.0, "LayerNorm(10, eps=0.5)"),
        (NormSpec(0.5, "layer", True, True), ("weight", "bias"), 0.0, "LayerNorm(10, eps=0.5)"),
    ],
)
def test_a_specification_builds_what_it_says(spec: NormSpec, parameters: tuple[str, ...], start: float, said: str) -> None:
    norm = spec.build(DIM)
    assert spec.parameters == parameters == tuple(name for name, _ in norm.named_parameters())
    assert (norm.eps, norm.from_one) == (spec.eps, spec.from_one)
    assert norm.weight.tolist() == [start] * DIM and repr(norm) == said
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        assert norm.bias.tolist() == [0.0] * DIM
    x = torch.randn(3, DIM)
    reference = F.layer_norm(x, (DIM,), eps=spec.eps) if spec.kind == "layer" else F.rms_norm(x, (DIM,), eps=spec.eps)
    torch.testing.assert_close(norm(x), reference)
