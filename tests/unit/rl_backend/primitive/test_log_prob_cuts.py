"""Log-probs of a distribution that is cut to some words, as an engine samples from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, SamplingCuts
from rl_backend.primitive import log_prob
from rl_backend.primitive.adapters import AdapterRun, Factors, dropped
from rl_backend.primitive.log_prob import NextToken, VocabularyShard, next_token_log_probs
from tests.support.token_cuts import mask_beside, of_kept
from tests.unit.rl_backend.primitive.test_log_prob_shards import H, T, V, inputs, on_ranks

TEMPERATURE = torch.linspace(0.3, 2.0, T, dtype=torch.float64)
CUTS = [
    *((0, 0.7, 0.0), (7, 1.0, 0.0), (7, 0.8, 0.0), (2, 0.6, 0.05), (0, 1.0, 0.1)),
    *((1, 1.0, 0.0), (V, 1.0, 0.0), (50, 0.999, 0.001), (0, 1e-6, 0.0)),
]


pytestmark = pytest.mark.usefixtures("logits_kept")


@pytest.fixture(autouse=True)
def several_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(log_prob._TILE_ELEMENTS, "cpu", 400 * 5)


def some_kept(logits: Tensor, labels: Tensor) -> Tensor:
    """The likeliest and the third for some of the labels, which chance would seldom take."""
    likely = logits.topk(3).indices
    labels[1], labels[4], labels[8] = likely[1, 0], likely[4, 2], likely[8, 0]
    return labels


def mixed(log_probs: Tensor, entropy: Tensor) -> Tensor:
    mix = torch.randn(2, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (log_probs * mix[0]).sum() + (entropy * mix[1]).sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "masked"), [*((*each, False) for each in CUTS), (7, 1.0, 0.0, True), (50, 0.9, 0.001, True)]
)
def test_log_probs_are_those_of_the_words_that_are_kept(top_k: int, top_p: float, min_p: float, masked: bool) -> None:
    """By the model's own logits; or with a mask, by what an engine says."""
    cuts = SamplingCuts(top_p, top_k, min_p)
    hidden, weight, bias, labels = inputs()
    leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
    logits = (leaves[0] @ leaves[1].t() + leaves[2]) / TEMPERATURE[:, None]
    labels = some_kept(logits, labels)
    if masked:
        cuts = cuts._replace(mask=mask_beside(logits.detach(), labels, cuts))
    log_probs, entropy, differs = of_kept(logits, labels, cuts)
    gradients = torch.autograd.grad(mixed(log_probs, entropy), leaves)
    assert (0 < differs[1] < 1 and differs[0] < differs[1]) if masked else differs[1] == 0
    assert top_k == V or differs.sum() >= 2

    def run(start: int, stop: int, shard: VocabularyShard | None) -> tuple[NextToken, tuple[Tensor, ...]]:
        own = [each.clone().requires_grad_() for each in (hidden, weight[start:stop], bias[start:stop])]
        found = next_token_log_probs(
            *own[:2],
            labels,
            bias=own[2],
            temperature=TEMPERATURE,
            chunk_tokens=5,
            calculate_entropy=True,
            shard=shard,
            cuts=cuts,
        )
        assert found.entropy is not None
        return found, torch.autograd.grad(mixed(found.log_probs, found.entropy), own)

    whole = run(0, V, None)
    parts, _ = on_ranks(lambda rank, start, stop, shard: run(start, stop, shard))
    for found, _ in (whole, *parts):
        torch.testing.assert_close((found.log_probs, found.entropy, found.mask_disagreement), (log_probs, entropy, differs))
    torch.testing.assert_close(whole[1], gradients)
    torch.testing.assert_close(sum(part[0] for _, part in parts), gradients[0])
    for place in (1, 2):
        torch.testing.assert_close(torch.cat([part[place] for _, part in parts]), gradients[place])


@pytest.mark.parametrize("masked", [False, True])
def test_an_adapter_of_the_head_is_cut_by_its_own_logits_or_what_an_engine_says(masked: bool) -> None:
    cuts, (hidden, weight, _, labels) = SamplingCuts(0.9, 20), inputs()
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, H), (V, 3)))
    logits = hidden @ weight.t() + (0.5 * hidden @ a.t() @ b.t()).where(torch.arange(T)[:, None] >= 4, 0.0)
    labels = some_kept(logits, labels)
    factors = Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 0.5, 0.0, 0)
    runs = [AdapterRun(0, 4, {}), AdapterRun(4, T, {"lm_head": factors})]
    if masked:
        cuts = cuts._replace(mask=mask_beside(logits, labels, cuts))
    found = next_token_log_probs(hidden, weight, labels, adapters=runs, chunk_tokens=4, cuts=cuts)
    log_probs, _, was_cut = of_kept(logits, labels, cuts)
    torch.testing.assert_close((found.log_probs, found.mask_disagreement), (log_probs, was_cut))


def test_nan_of_one_token_is_its_own() -> None:
    hidden, weight, _, labels = inputs()
    options: Any = {"cuts": SamplingCuts(0.9, 20), "calculate_entropy": True, "chunk_tokens": 5}
    expected = next_token_log_probs(hidden, weight, labels, **options)
    hidden[3] = torch.nan
    found = next_token_log_probs(hidden, weight, labels, **options)
    assert found.log_probs[3].isnan() and found.mask_disagreement is not None and expected.mask_disagreement is not None
    others = torch.arange(T) != 3
    for mine, other in zip(
        (found.log_probs, found.mask_disagreement), (expected.log_probs, expected.mask_disagreement), strict=True
    ):
        assert torch.equal(mine[others], other[others])


def test_words_far_below_the_likeliest_are_kept_where_the_likely_ones_are_too_few() -> None:
    logits = torch.full((1, 40), -100.0, dtype=torch.float64)
    logits[0, :3] = torch.tensor([0.0, -1.0, -2.0])
    found = next_token_log_probs(logits, torch.eye(40, dtype=torch.float64), torch.tensor([30]), cuts=SamplingCuts(1.0, 5))
    assert found.mask_disagreement is not None and found.mask_disagreement.item() == 0
    assert found.log_probs.item() == pytest.approx(-100.0 - math.log(1 + math.exp(-1) + math.exp(-2)))


@pytest.mark.parametrize(
    "meta",
    [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 1.0}, {"min_p": -0.1}, {"top_p": float("nan")}],
    ids=str,
)
def test_cuts_that_cannot_be_are_refused(meta: dict[str, float]) -> None:
    batch = PackedBatch(torch.arange(4), torch.tensor([4]), meta=meta)
    with pytest.raises(BatchError, match=r"top_p is above 0 and at most 1"):
        _ = batch.cuts
    assert PackedBatch(torch.arange(4), torch.tensor([4]), meta={"top_p": 1.0, "top_k": 0}).cuts is None
    several = PackedBatch(torch.arange(4), torch.tensor([4]), {"target_ids": torch.zeros(4, 2, dtype=torch.int64)})
    assert several.cuts is None
    with pytest.raises(BatchError, match="which is sampled is unknown"):
        _ = PackedBatch(several.input_ids, several.seq_lens, several.token_fields, meta={"top_k": 3}).cuts


@pytest.mark.parametrize("masked", [False, True])
def test_a_pass_without_a_label_has_nothing_to_cut_and_still_its_likeliest_tokens(masked: bool) -> None:
    hidden, weight, bias, _ = inputs()
    labels, own = torch.full((T,), -100), hidden.clone().requires_grad_()
    mask = torch.full((T, 3), -1, dtype=torch.int32) if masked else None
    found = next_token_log_probs(
        own, weight, labels, bias=bias, calculate_entropy=True, top=3, cuts=SamplingCuts(0.9, 5, 0.01, mask), chunk_tokens=5
    )
    assert found.entropy is not None and found.mask_disagreement is not None and found.top is not None
    assert [each.tolist() for each in (found.log_probs, found.entropy, found.mask_disagreement)] == [[0.0] * T] * 3
    assert torch.equal(found.top.ids, (hidden @ weight.t() + bias).topk(3).indices)
    (gradient,) = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), own)
    assert not gradient.any()


@pytest.mark.parametrize("masked", [False, True])
def test_every_option_at_once_is_a_softmax_over_the_words_that_are_kept(masked: bool) -> None:
    """Labels of rows that they share, with a bias, temperatures, two adapters, of which one has the head, and a gap."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.tensor([0, 0, 1, 4, 4, 2, 3, 3, 3, 0, 2, 1, 4])
    _, weight, bias, labels = inputs()
    hidden, a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((5, H), (3, H), (V, 3)))
    factors = Factors(a, b, torch.zeros_like(a), torch.zeros_like(b), 0.5, 0.4, 7)
    runs = [AdapterRun(0, 2, {}), AdapterRun(3, 9, {"lm_head": factors}, draw=2), AdapterRun(9, T, {})]
    # The head is frozen where adapters are at work.
    leaves = [each.clone().requires_grad_() for each in (hidden, a, b)]
    own_rows = leaves[0][rows]
    kept = torch.zeros(T, H, dtype=torch.float64)
    kept[3:9] = dropped(torch.ones(6, H, dtype=torch.float64), 2, factors)
    logits = own_rows @ weight.t() + bias + 0.5 * (own_rows * kept) @ leaves[1].t() @ leaves[2].t()
    logits = logits / TEMPERATURE[:, None]
    cuts = SamplingCuts(0.9, 20, 0.001)
    labels = some_kept(logits, labels)
    if masked:
        cuts = cuts._replace(mask=mask_beside(logits.detach(), labels, cuts))
    log_probs, entropy, differs = of_kept(logits, labels, cuts)
    expected = torch.autograd.grad(mixed(log_probs, entropy), leaves)
    own = hidden.clone().requires_grad_()
    found = next_token_log_probs(
        own,
        weight,
        labels,
        bias=bias,
        temperature=TEMPERATURE,
        chunk_tokens=4,
        calculate_entropy=True,
        adapters=runs,
        top=3,
        cuts=cuts,
        of_rows=rows,
    )
    assert found.entropy is not None and found.top is not None
    torch.testing.assert_close((found.log_probs, found.entropy, found.mask_disagreement), (log_probs, entropy, differs))
    likeliest = logits.detach().log_softmax(-1).topk(3)
    assert torch.equal(found.top.ids, likeliest.indices)
    torch.testing.assert_close(found.top.log_probs, likeliest.values)
    gradients = torch.autograd.grad(mixed(found.log_probs, found.entropy), own)
    torch.testing.assert_close((*gradients, factors.grad_a, factors.grad_b), expected)
