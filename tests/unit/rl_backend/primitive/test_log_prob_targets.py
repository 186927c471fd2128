"""Several labels for each token: log-probs of all of them from logits that are computed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError
from rl_backend.primitive import log_prob
from rl_backend.primitive.adapters import AdapterRun, Factors
from rl_backend.primitive.log_prob import next_token_log_probs
from tests.unit.rl_backend.primitive.test_log_prob_shards import H, T, V, on_ranks

K = 4

pytestmark = pytest.mark.usefixtures("logits_kept")


@pytest.fixture(autouse=True)
def several_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 400 * 5)


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels (T, K) and what log-probs are multiplied with."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, mix = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((T, H), (V, H), (T, K + 1))
    )
    labels = torch.randint(0, V, (T, K), generator=generator)
    labels[0] = torch.tensor([0, V - 1, 7, 7])  # both ends, and one twice
    labels[1] = -100
    labels[2, 1:] = -100
    labels[T - 1, 0] = -100
    return hidden, weight, labels, mix


def reference(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    distribution, asked = logits.log_softmax(-1), labels != -100
    entropy = -(distribution.exp() * distribution).sum(-1).where(asked.any(1), 0.0)
    return distribution.gather(1, labels.clamp(min=0)).where(asked, 0.0), entropy


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [0.6, torch.linspace(0.5, 2.0, T, dtype=torch.float64)])
@pytest.mark.parametrize("entropy", [False, True])
def test_values_and_gradients_are_those_of_a_full_softmax(
    chunk_tokens: int, temperature: float | Tensor, entropy: bool
) -> None:
    hidden, weight, labels, mix = inputs()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    divided = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    expected = reference(leaves[0] @ leaves[1].t() / divided, labels)
    own = [each.clone().requires_grad_() for each in (hidden, weight)]
    found = next_token_log_probs(*own, labels, temperature=temperature, chunk_tokens=chunk_tokens, calculate_entropy=entropy)
    torch.testing.assert_close(found.log_probs, expected[0])
    totals = [(found.log_probs * mix[:, :K]).sum(), (expected[0] * mix[:, :K]).sum()]
    if entropy:
        assert found.entropy is not None
        torch.testing.assert_close(found.entropy, expected[1])
        totals = [totals[0] + (found.entropy * mix[:, K]).sum(), totals[1] + (expected[1] * mix[:, K]).sum()]
    gradients = torch.autograd.grad(totals[0], own), torch.autograd.grad(totals[1], leaves)
    torch.testing.assert_close(*gradients)


def test_one_label_in_two_dimensions_has_the_bits_of_one_in_one() -> None:
    hidden, weight, labels, mix = inputs()
    results = []
    for of_tokens in (labels[:, 0], labels[:, :1]):
        own = [each.float().requires_grad_() for each in (hidden, weight)]
        log_probs = next_token_log_probs(*own, of_tokens, chunk_tokens=5).log_probs
        assert log_probs.shape == of_tokens.shape
        total = (log_probs.flatten() * mix[:, 0].float()).sum()
        results.append((log_probs.flatten(), *torch.autograd.grad(total, own)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_logits_of_a_token_are_computed_once_for_all_of_its_labels(
    monkeypatch: pytest.MonkeyPatch, logits_kept: bool
) -> None:
    hidden, weight, labels, mix = inputs()
    computed: list[int] = []
    original = log_prob._matmul

    def counting(a: Tensor, b: Tensor, out: Tensor) -> None:
        computed.append(out.numel())
        original(a, b, out)

    monkeypatch.setattr(log_prob, "_matmul", counting)
    hidden.requires_grad_()
    (next_token_log_probs(hidden, weight, labels).log_probs * mix[:, :K]).sum().backward()
    assert sum(computed) == (1 if logits_kept else 2) * (T - 1) * V  # one token has no label


def test_a_split_vocabulary_gives_every_rank_the_whole() -> None:
    hidden, weight, labels, mix = inputs()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    expected = reference(leaves[0] @ leaves[1].t(), labels)
    gradients = torch.autograd.grad((expected[0] * mix[:, :K]).sum() + (expected[1] * mix[:, K]).sum(), leaves)

    def work(rank: int, start: int, stop: int, shard: log_prob.VocabularyShard) -> tuple[Tensor, list[Tensor]]:
        own = [each.clone().requires_grad_() for each in (hidden, weight[start:stop])]
        found = next_token_log_probs(*own, labels, shard=shard, chunk_tokens=5, calculate_entropy=True)
        assert found.entropy is not None
        total = (found.log_probs * mix[:, :K]).sum() + (found.entropy * mix[:, K]).sum()
        return found.log_probs.detach(), list(torch.autograd.grad(total, own))

    results, _ = on_ranks(work)
    for log_probs, _ in results:
        torch.testing.assert_close(log_probs, expected[0].detach())
    torch.testing.assert_close(sum(found[0] for _, found in results), gradients[0])
    torch.testing.assert_close(torch.cat([found[1] for _, found in results]), gradients[1])


def test_adapters_of_the_head_work_on_their_rows() -> None:
    hidden, weight, labels, mix = inputs()
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, H), (V, 3)))
    leaves = [each.clone().requires_grad_() for each in (hidden, a, b)]
    added = 0.5 * leaves[0] @ leaves[1].t() @ leaves[2].t()
    rows = torch.arange(T) >= 4
    logits = leaves[0] @ weight.t() + added.where(rows[:, None], 0.0)
    expected = reference(logits, labels)[0]
    gradients = torch.autograd.grad((expected * mix[:, :K]).sum(), leaves)
    factors = Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 0.5, 0.0, 0)
    runs = [AdapterRun(0, 4, {}), AdapterRun(4, T, {"lm_head": factors})]
    own = hidden.clone().requires_grad_()
    found = next_token_log_probs(own, weight, labels, adapters=runs, chunk_tokens=4).log_probs
    torch.testing.assert_close(found, expected)
    (of_hidden,) = torch.autograd.grad((found * mix[:, :K]).sum(), [own])
    torch.testing.assert_close((of_hidden, factors.grad_a, factors.grad_b), gradients)


def test_a_label_outside_the_vocabulary_is_refused() -> None:
    hidden, weight, labels, _ = inputs()
    labels[5, 2] = V
    with pytest.raises(BatchError, match=f"labels reach from 0 to {V}"):
        next_token_log_probs(hidden, weight, labels)
