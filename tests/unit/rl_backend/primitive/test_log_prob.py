"""Chunked log-probs and entropy against a full softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError
from rl_backend.primitive import tiles
from rl_backend.primitive.log_prob import NextToken, next_token_log_probs

T, H, V = 21, 8, 1500


@pytest.fixture(autouse=True)
def several_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles._TILE_ELEMENTS, "cpu", 400 * 5)


def make_inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = scale * torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[[3, T - 1]] = -100
    labels[[0, 1]] = torch.tensor([0, V - 1])
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def full_softmax(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: Tensor | float = 1.0) -> NextToken:
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]
    distribution = (hidden @ weight.t() / temperature).log_softmax(-1)
    kept = labels != -100
    log_probs = distribution.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return NextToken(log_probs.where(kept, 0.0), entropy.where(kept, 0.0))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.linspace(0.5, 2.0, T, dtype=torch.float64)])
@pytest.mark.parametrize("calculate_entropy", [False, True])
def test_values_and_gradients_equal_a_full_softmax(
    chunk_tokens: int, temperature: float | Tensor, calculate_entropy: bool
) -> None:
    hidden, weight, labels = make_inputs()
    mix = torch.randn(2, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    outputs = (
        next_token_log_probs(
            hidden, weight, labels, temperature=temperature, chunk_tokens=chunk_tokens, calculate_entropy=calculate_entropy
        ),
        full_softmax(hidden, weight, labels, temperature),
    )
    for output in outputs:
        total = (output.log_probs * mix[0]).sum()
        if calculate_entropy:
            total = total + (output.entropy * mix[1]).sum()
        gradients.append(torch.autograd.grad(total, (hidden, weight)))
    torch.testing.assert_close(outputs[0].log_probs, outputs[1].log_probs)
    if calculate_entropy:
        torch.testing.assert_close(outputs[0].entropy, outputs[1].entropy)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("calculate_entropy", [False, True])
def test_a_shorter_last_chunk_fits_the_memory_of_the_others(
    monkeypatch: pytest.MonkeyPatch, calculate_entropy: bool
) -> None:
    monkeypatch.setitem(tiles._TILE_ELEMENTS, "cpu", 2**21)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1512, 4, generator=generator)
    weight = torch.randn(5000, 4, generator=generator)
    labels = torch.randint(0, 5000, (1512,), generator=generator)
    output = next_token_log_probs(hidden, weight, labels, chunk_tokens=1000, calculate_entropy=calculate_entropy)
    expected = full_softmax(hidden, weight, labels)
    torch.testing.assert_close(output.log_probs, expected.log_probs)
    if calculate_entropy:
        torch.testing.assert_close(output.entropy, expected.entropy)


def test_gradcheck_passes_for_log_probs_and_entropy() -> None:
    hidden, weight, labels = make_inputs()
    hidden, weight = hidden[:6].detach().requires_grad_(), weight[:300].detach().requires_grad_()
    labels = torch.tensor([0, 299, 150, -100, 7, 280])

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return tuple(next_token_log_probs(hidden, weight, labels, temperature=0.9, chunk_tokens=4, calculate_entropy=True))

    assert torch.autograd.gradcheck(both, (hidden, weight), fast_mode=True)


def test_ignored_positions_give_zero_and_take_no_gradient() -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    poisoned = hidden.detach().clone()
    poisoned[[3, T - 1]] = torch.nan
    poisoned.requires_grad_()
    output = next_token_log_probs(poisoned, weight, labels, calculate_entropy=True)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert output.log_probs[3] == output.entropy[3] == 0
    assert torch.isfinite(output.log_probs).all()
    assert (poisoned.grad[[3, T - 1]] == 0).all()
    assert torch.isfinite(weight.grad).all()


def test_tokens_without_an_upstream_gradient_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    output = next_token_log_probs(hidden, weight, labels)
    rows: list[int] = []
    original = tiles._matmul

    def counting(a: Tensor, b: Tensor, out: Tensor) -> None:
        rows.append(a.shape[0])
        original(a, b, out)

    monkeypatch.setattr(tiles, "_matmul", counting)
    (output.log_probs * (torch.arange(T) >= 15)).sum().backward()
    assert set(rows) == {5}
    assert (hidden.grad[:15] == 0).all()


def test_a_non_finite_upstream_gradient_reaches_the_weights() -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    output = next_token_log_probs(hidden, weight, labels)
    output.log_probs[5].mul(torch.nan).backward()
    assert torch.isnan(weight.grad).any()
    assert torch.isnan(hidden.grad[5]).all()


def test_nothing_to_predict_gives_zeros_and_zero_gradients() -> None:
    hidden, weight, _ = make_inputs(torch.float32)
    output = next_token_log_probs(hidden, weight, torch.full((T,), -100), calculate_entropy=True)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert (output.log_probs == 0).all() and (output.entropy == 0).all()
    assert (hidden.grad == 0).all() and (weight.grad == 0).all()


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, labels = make_inputs(torch.float32, scale=200.0)
    output = next_token_log_probs(hidden, weight, labels, calculate_entropy=True)
    (output.log_probs.sum() + output.entropy.sum()).backward()
    for value in (output.log_probs, output.entropy, hidden.grad, weight.grad):
        assert torch.isfinite(value).all()
    assert (output.entropy >= -1e-5).all()
    expected = full_softmax(hidden.double(), weight.double(), labels)
    torch.testing.assert_close(output.log_probs.double(), expected.log_probs, atol=1e-2, rtol=1e-5)


def test_bfloat16_weights_get_a_float32_softmax() -> None:
    hidden, weight, labels = make_inputs(torch.bfloat16)
    output = next_token_log_probs(hidden, weight, labels, calculate_entropy=True)
    expected = full_softmax(hidden.float(), weight.float(), labels)
    assert output.log_probs.dtype == torch.float32
    torch.testing.assert_close(output.log_probs, expected.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.entropy, expected.entropy, atol=1e-5, rtol=1e-5)
    output.log_probs.sum().backward()
    wanted = torch.autograd.grad(expected.log_probs.sum(), (hidden, weight))
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(hidden.grad, wanted[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(weight.grad, wanted[1], atol=2e-2, rtol=2e-2)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_still_do() -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    next_token_log_probs(hidden, weight.detach(), labels).log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.shows("model: full-vocabulary logits are never kept")
def test_full_vocabulary_logits_are_neither_saved_nor_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles._TILE_ELEMENTS, "cpu", 2**21)
    hidden, weight, labels = make_inputs(torch.float32)
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    largest: list[int] = []
    original = tiles._matmul

    def measuring(a: Tensor, b: Tensor, out: Tensor) -> None:
        largest.append(out.numel())
        original(a, b, out)

    monkeypatch.setattr(tiles, "_matmul", measuring)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = next_token_log_probs(hidden, weight, labels, chunk_tokens=4, calculate_entropy=True)
    output.log_probs.sum().backward()
    assert max(saved) == V * H
    assert max(largest) <= 4 * V


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0: must be positive"),
        ({"temperature": torch.zeros(T)}, "each must be positive"),
        ({"labels": torch.full((T,), V)}, f"to {V}; the vocabulary has {V}"),
        ({"labels": torch.full((T,), -1)}, "reach from -1"),
    ],
)
def test_bad_inputs_are_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    with pytest.raises(BatchError, match=message):
        next_token_log_probs(hidden, weight, change.pop("labels", labels), **change)
