"""Chunked log-probs and entropy against a full softmax."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import BatchError
from rl_backend.primitive import log_prob
from rl_backend.primitive.adapters import AdapterRun, Factors
from rl_backend.primitive.log_prob import IGNORE_LABEL, NextToken, next_token_log_probs
from tests.support.largest_result import LargestResult

T, H, V = 21, 8, 1500

pytestmark = pytest.mark.usefixtures("logits_kept")


@pytest.fixture(autouse=True)
def several_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 400 * 5)


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
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 2**21)
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
        found = next_token_log_probs(hidden, weight, labels, temperature=0.9, chunk_tokens=4, calculate_entropy=True)
        assert found.entropy is not None
        return found.log_probs, found.entropy

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


def test_tokens_without_an_upstream_gradient_are_not_computed_again(
    monkeypatch: pytest.MonkeyPatch, logits_kept: bool
) -> None:
    hidden, weight, labels = make_inputs(torch.float32)
    output = next_token_log_probs(hidden, weight, labels)
    rows: list[int] = []
    original = log_prob._matmul

    def counting(a: Tensor, b: Tensor, out: Tensor) -> None:
        rows.append(a.shape[0])
        original(a, b, out)

    monkeypatch.setattr(log_prob, "_matmul", counting)
    (output.log_probs * (torch.arange(T) >= 15)).sum().backward()
    assert set(rows) == (set() if logits_kept else {5})
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
@pytest.mark.parametrize("budget", [T * V * 4 - 1, T * V * 4])
def test_full_vocabulary_logits_are_saved_within_a_budget_and_not_made_at_once(
    monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(log_prob, "KEPT_BYTES", budget)
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 2**21)
    hidden, weight, labels = make_inputs(torch.float32)
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape[-1])
        return tensor

    largest: list[int] = []
    original = log_prob._matmul

    def measuring(a: Tensor, b: Tensor, out: Tensor) -> None:
        largest.append(out.numel())
        original(a, b, out)

    monkeypatch.setattr(log_prob, "_matmul", measuring)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = next_token_log_probs(hidden, weight, labels, chunk_tokens=4, calculate_entropy=True)
    output.log_probs.sum().backward()
    assert (V in saved) == (budget == T * V * 4)
    assert max(largest) <= 4 * V
    with torch.no_grad(), LargestResult() as made:
        next_token_log_probs(hidden, weight, labels, chunk_tokens=4)
    assert 0 < made.nbytes <= 8 * V * 4, "a pass without gradients keeps none"


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
        next_token_log_probs(hidden, weight, **{"labels": labels, **change})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_give_the_gradients_of_those_that_are_computed_again(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """With labels missing, tokens without a gradient, a temperature for each token and an entropy."""
    found = []
    for budget in (0, log_prob.KEPT_BYTES or 2**30):
        monkeypatch.setattr(log_prob, "KEPT_BYTES", budget)
        hidden, weight, labels = make_inputs(dtype)
        labels[::7] = IGNORE_LABEL
        temperature = torch.linspace(0.5, 2, T)
        output = next_token_log_probs(
            hidden, weight, labels, temperature=temperature, chunk_tokens=6, calculate_entropy=True
        )
        trained = torch.arange(T) % 3 > 0
        total = (output.log_probs * trained).sum() + (output.entropy.square() * trained).sum()
        found.append(torch.autograd.grad(total, (hidden, weight)))
    for again, kept in zip(*found, strict=True):
        torch.testing.assert_close(kept, again, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adapts_head", [False, True])
def test_rows_of_adapters_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch, adapts_head: bool) -> None:
    """Tiles of the vocabulary are cut by the number of tokens."""
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 2**14)
    torch.manual_seed(0)
    vocab, rows, hidden, weight = 1000, (40, 100), torch.randn(140, 32), torch.randn(1000, 32)
    labels, temperature = torch.randint(vocab, (140,)), 0.5 + torch.rand(140)
    factors = []
    for _ in rows:
        a, b = torch.randn(16, 32), torch.randn(vocab, 16)
        factors.append(Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), scale=0.1, dropout=0.0, seed=0))
    modules = [{"lm_head": each} if adapts_head else {} for each in factors]
    runs = [AdapterRun(0, 40, modules[0]), AdapterRun(40, 140, modules[1])]

    def results(rows: slice, runs: list[AdapterRun]) -> list[torch.Tensor]:
        x = hidden[rows].clone().requires_grad_()
        output = next_token_log_probs(
            x, weight, labels[rows], adapters=runs, calculate_entropy=True, temperature=temperature[rows]
        )
        assert output.entropy is not None
        (output.log_probs * 3 + output.entropy).sum().backward()
        assert x.grad is not None
        return [output.log_probs.detach(), output.entropy.detach(), x.grad]

    together = results(slice(0, 140), runs)
    gradients = factors[0].grad_a.clone(), factors[0].grad_b.clone()
    factors[0].grad_a.zero_(), factors[0].grad_b.zero_()
    alone = results(slice(0, 40), runs[:1])
    assert all(torch.equal(mine, both[:40]) for mine, both in zip(alone, together, strict=True))
    assert torch.equal(gradients[0], factors[0].grad_a)
    assert torch.equal(gradients[1], factors[0].grad_b)
    for part, adapter in zip((slice(0, 40), slice(40, 140)), factors if adapts_head else (), strict=adapts_head):
        a, b = (each.clone().requires_grad_() for each in adapter[:2])
        x = hidden[part].clone().requires_grad_()
        log_p = torch.log_softmax((x @ weight.t() + 0.1 * (x @ a.t()) @ b.t()) / temperature[part, None], -1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (log_p.gather(1, labels[part, None]).squeeze(1) * 3 + entropy).sum().backward()
        for mine, expected in zip((together[2][part], *adapter[2:4]), (x.grad, a.grad, b.grad), strict=True):
            assert torch.allclose(mine, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sizes", [(5, 100), (40, 1500), (3, 2, 30), (700, 700)])
@pytest.mark.parametrize("tile", [2**14, 2**21])
def test_rows_of_several_adapters_are_computed_together_with_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], tile: int
) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", tile)
    torch.manual_seed(0)
    total, vocab = sum(sizes), 3000
    hidden, weight, labels = torch.randn(total, 64), torch.randn(vocab, 64) / 8, torch.randint(vocab, (total,))
    labels[::7] = IGNORE_LABEL

    def results(rows: slice, runs: list[AdapterRun]) -> list[torch.Tensor]:
        x = hidden[rows].clone().requires_grad_()
        output = next_token_log_probs(x, weight, labels[rows], adapters=runs)
        output.log_probs.sum().backward()
        assert x.grad is not None
        return [output.log_probs.detach(), x.grad]

    edges = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    together = results(slice(0, total), [AdapterRun(start, stop, {}) for start, stop in itertools.pairwise(edges)])
    for start, stop in itertools.pairwise(edges):
        alone = results(slice(start, stop), [AdapterRun(0, stop - start, {})])
        assert all(torch.equal(mine, both[start:stop]) for mine, both in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_of_the_head_is_added_before_the_temperature_and_has_its_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 4, generator=generator).to(dtype)
    head = nn.Linear(4, 11).to(dtype)
    labels = torch.tensor([3, 1, -100, 10, 0, 5, 5, -100, 2])
    found = next_token_log_probs(
        hidden, head.weight, labels, bias=head.bias, temperature=0.7, chunk_tokens=3, calculate_entropy=True
    )
    expected = ((hidden.float() @ head.weight.float().t() + head.bias.float()) / 0.7).log_softmax(-1)
    kept = labels >= 0
    log_probs = expected[kept].gather(1, labels[kept][:, None])[:, 0]
    entropy = -(expected.exp() * expected).sum(-1)[kept]
    torch.testing.assert_close(found.log_probs[kept], log_probs, atol=1e-5, rtol=1e-4)
    mix = torch.randn(2, int(kept.sum()), generator=generator)
    assert found.entropy is not None
    gradients = []
    for pair in ((found.log_probs[kept], found.entropy[kept]), (log_probs, entropy)):
        total = (pair[0] * mix[0]).sum() + (pair[1] * mix[1]).sum()
        gradients.append(torch.autograd.grad(total, head.bias))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(gradients[0], gradients[1], atol=tolerance, rtol=tolerance)


def test_an_entropy_that_is_a_metric_alone_changes_no_gradient_and_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        log_prob,
        "gradients_of",
        lambda *given, real=log_prob.gradients_of: seen.append(given[2].entropy) or real(*given),
    )
    gradients = []
    for calculate_entropy in (False, True):
        hidden, weight, labels = make_inputs()
        found = next_token_log_probs(hidden, weight, labels, chunk_tokens=5, calculate_entropy=calculate_entropy)
        gradients.append(torch.autograd.grad(found.log_probs.square().sum(), (hidden, weight)))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    assert seen == [None, None]
    # And an entropy whose log-probs nobody asks for.
    hidden, weight, labels = make_inputs()
    expected = torch.autograd.grad(full_softmax(hidden, weight, labels).entropy.sum(), hidden)
    found = next_token_log_probs(hidden, weight, labels, chunk_tokens=5, calculate_entropy=True)
    torch.testing.assert_close(torch.autograd.grad(found.entropy.sum(), hidden), expected)
