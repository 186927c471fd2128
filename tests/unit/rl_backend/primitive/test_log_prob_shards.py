"""A vocabulary that is split over ranks: the same results on each, and the whole's gradients in their parts.

Ranks are threads here, which meet at a barrier for each reduction.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, SamplingCuts
from rl_backend.primitive import log_prob
from rl_backend.primitive.adapters import AdapterRun, Factors
from rl_backend.primitive.log_prob import IGNORE_LABEL, NextToken, VocabularyShard, next_token_log_probs

T, H, V = 13, 5, 900
SIZES = (300, 257, 343)

pytestmark = pytest.mark.usefixtures("logits_kept")


class Rendezvous:
    """Reductions over ranks that are threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._given = threading.Barrier(ranks, timeout=20), [torch.empty(0)] * ranks
        self.reduced: list[tuple[int, str, tuple[int, ...]]] = []

    def shard(self, rank: int, start: int) -> VocabularyShard:
        return VocabularyShard(start, V, self._reduce(rank, "max"), self._reduce(rank, "sum"), partial(self._gather, rank))

    def _gather(self, rank: int, tensor: Tensor) -> Tensor:
        self._given[rank] = tensor
        self._barrier.wait()
        whole = torch.cat(self._given)
        self._barrier.wait()
        return whole

    def _reduce(self, rank: int, kind: str) -> Callable[[Tensor], None]:
        def reduce(tensor: Tensor) -> None:
            self.reduced.append((rank, kind, tuple(tensor.shape)))
            self._given[rank] = tensor.clone()
            self._barrier.wait()
            whole = torch.stack(self._given)
            self._barrier.wait()
            tensor.copy_(whole.amax(0) if kind == "max" else whole.sum(0))

        return reduce


@pytest.fixture(autouse=True)
def several_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 400 * 5)


def inputs(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, labels; every rank has some, and two ignore theirs."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((T, H), (V, H), (V,)))
    labels = torch.randint(0, V, (T,), generator=generator)
    labels[:6] = torch.tensor([0, 299, 300, 556, 557, V - 1])
    labels[[7, T - 1]] = IGNORE_LABEL
    return scale * hidden, weight, bias, labels


def on_ranks[R](work: Callable[[int, int, int, VocabularyShard], R]) -> tuple[list[R], Rendezvous]:
    """``work(rank, start, stop, shard)`` on every rank."""
    meeting = Rendezvous(len(SIZES))
    starts = [sum(SIZES[:rank]) for rank in range(len(SIZES))]
    with ThreadPoolExecutor(len(SIZES)) as pool:
        futures = [
            pool.submit(work, rank, start, start + size, meeting.shard(rank, start))
            for rank, (start, size) in enumerate(zip(starts, SIZES, strict=True))
        ]
        return [future.result() for future in futures], meeting


def mixed(output: NextToken, entropy: bool) -> Tensor:
    mix = torch.randn(2, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (output.log_probs * mix[0]).sum()
    if entropy:
        assert output.entropy is not None
        total = total + (output.entropy * mix[1]).sum()
    return total


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_every_rank_has_the_results_of_the_whole_and_its_part_of_the_gradients(entropy: bool, scale: float) -> None:
    hidden, weight, bias, labels = inputs(scale)
    temperature = torch.linspace(0.5, 1.5, T, dtype=torch.float64)
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    logits = (leaves[0] @ leaves[1].t() + leaves[2]) / temperature[:, None]
    distribution, kept = logits.log_softmax(-1), labels != IGNORE_LABEL
    expected = NextToken(
        distribution.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(kept, 0.0),
        -torch.xlogy(distribution.exp(), distribution.exp()).sum(-1).where(kept, 0.0),
    )
    if scale == 1.0:
        gradients = torch.autograd.grad(mixed(expected, entropy), leaves)

    def work(rank: int, start: int, stop: int, shard: VocabularyShard) -> tuple[NextToken, list[Tensor]]:
        own = [each.clone().requires_grad_() for each in (hidden, weight[start:stop], bias[start:stop])]
        output = next_token_log_probs(
            own[0],
            own[1],
            labels,
            bias=own[2],
            temperature=temperature,
            chunk_tokens=5,
            calculate_entropy=entropy,
            shard=shard,
        )
        return output, list(torch.autograd.grad(mixed(output, entropy), own))

    results, meeting = on_ranks(work)
    for output, _ in results:
        torch.testing.assert_close(output.log_probs, expected.log_probs)
        assert (output.entropy is not None) is entropy
        if output.entropy is not None:
            torch.testing.assert_close(output.entropy, expected.entropy, atol=1e-9, rtol=1e-9)
    if scale == 1.0:
        torch.testing.assert_close(sum(found[0] for _, found in results), gradients[0])
        for place in (1, 2):
            torch.testing.assert_close(torch.cat([found[place] for _, found in results]), gradients[place])
    assert sorted(meeting.reduced) == sorted(
        (rank, *each) for rank in range(len(SIZES)) for each in (("max", (T - 2,)), ("sum", (3, T - 2)))
    )


def test_an_adapter_of_a_split_head_has_the_gradients_of_its_part() -> None:
    hidden, weight, _, labels = inputs()
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, H), (V, 3)))
    rows = slice(4, T)
    leaves = [each.clone().requires_grad_() for each in (hidden, a, b)]
    change = torch.zeros(T, V, dtype=torch.float64)
    change = torch.cat((change[:4], 0.5 * leaves[0][rows] @ leaves[1].t() @ leaves[2].t()))
    distribution = (leaves[0] @ weight.t() + change).log_softmax(-1)
    log_probs = distribution.gather(1, labels.clamp(min=0)[:, None])[:, 0].where(labels != IGNORE_LABEL, 0.0)
    expected = torch.autograd.grad(mixed(NextToken(log_probs, None), False), leaves)

    def work(rank: int, start: int, stop: int, shard: VocabularyShard) -> tuple[Tensor, Tensor, Factors]:
        part = b[start:stop].clone()
        factors = Factors(a, part, torch.zeros_like(a), torch.zeros_like(part), 0.5, 0.0, 0)
        own = hidden.clone().requires_grad_()
        runs = [AdapterRun(0, 4, {}), AdapterRun(4, T, {"lm_head": factors})]
        output = next_token_log_probs(own, weight[start:stop], labels, shard=shard, adapters=runs, chunk_tokens=4)
        (gradient,) = torch.autograd.grad(mixed(output, False), [own])
        return output.log_probs.detach(), gradient, factors

    results, _ = on_ranks(work)
    for found, _, _ in results:
        torch.testing.assert_close(found, log_probs.detach())
    torch.testing.assert_close(sum(gradient for _, gradient, _ in results), expected[0])
    torch.testing.assert_close(sum(factors.grad_a for *_, factors in results), expected[1])
    torch.testing.assert_close(torch.cat([factors.grad_b for *_, factors in results]), expected[2])


def test_labels_are_checked_against_the_whole_vocabulary() -> None:
    hidden, weight, _, labels = inputs()

    def nothing(_: Tensor) -> None:
        pass

    shard = VocabularyShard(0, V, nothing, nothing, torch.clone)
    next_token_log_probs(hidden, weight[:300], labels, shard=shard)
    with pytest.raises(BatchError, match=f"labels reach from 0 to {V}; the vocabulary has {V} tokens"):
        next_token_log_probs(hidden, weight[:300], labels.masked_fill(labels == V - 1, V), shard=shard)


@pytest.mark.parametrize("temperature", [-1.0, 0.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused_with_its_value(temperature: float) -> None:
    hidden, weight, _, labels = inputs()
    with pytest.raises(BatchError, match=f"temperature={temperature}: must be positive"):
        next_token_log_probs(hidden, weight, labels, temperature=temperature)
    by_token = torch.ones(T, dtype=torch.float64)
    by_token[3] = temperature
    with pytest.raises(BatchError, match=f"temperature has a value of {temperature}: each must be positive"):
        next_token_log_probs(hidden, weight, labels, temperature=by_token)


@pytest.mark.parametrize("labels", [[-2, 3], [-100, -1], [2, -99]])
def test_negative_labels_but_one_are_refused(labels: list[int]) -> None:
    smallest = min(label for label in labels if label != IGNORE_LABEL)
    with pytest.raises(BatchError, match=f"labels reach from {smallest} to {max(labels)}"):
        next_token_log_probs(torch.randn(2, H), torch.randn(7, H), torch.tensor(labels))


@pytest.mark.parametrize("sizes", [(0, 500, 400), (600, 0, 300), (500, 400, 0)], ids=str)
@pytest.mark.parametrize("cuts", [None, SamplingCuts(0.95, 30)], ids=["whole", "cut"])
def test_a_rank_without_words_has_the_results_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int], cuts: SamplingCuts | None
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SIZES", sizes)
    hidden, weight, bias, labels = inputs()

    def run(start: int, stop: int, shard: VocabularyShard | None) -> tuple[NextToken, list[Tensor]]:
        own = [each.clone().requires_grad_() for each in (hidden, weight[start:stop], bias[start:stop])]
        output = next_token_log_probs(
            own[0],
            own[1],
            labels,
            bias=own[2],
            chunk_tokens=5,
            calculate_entropy=True,
            top=4,
            shard=shard,
            cuts=cuts,
        )
        return output, list(torch.autograd.grad(mixed(output, True), own))

    whole, gradients = run(0, V, None)
    results, _ = on_ranks(lambda rank, start, stop, shard: run(start, stop, shard))
    assert whole.top is not None
    for output, _ in results:
        torch.testing.assert_close(output.log_probs, whole.log_probs)
        torch.testing.assert_close((output.entropy, output.mask_disagreement), (whole.entropy, whole.mask_disagreement))
        assert output.top is not None and torch.equal(output.top.ids, whole.top.ids)
        torch.testing.assert_close(output.top.log_probs, whole.top.log_probs)
    torch.testing.assert_close(sum(found[0] for _, found in results), gradients[0])
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([found[place] for _, found in results]), gradients[place])
