"""Tinker's losses against plain torch written from the formulas, and sums that no split changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import tinker_losses
from rl_backend.contracts import TARGET_IDS, BatchError, LossFn, ModelOutput, PackedBatch, TokenSequence
from rl_backend.data import pack, pack_plan, plan_micro_batches

LENGTHS = (7, 4, 11, 5)
K = 3


def sequences(seed: int = 0) -> list[TokenSequence]:
    """Prompts without advantage, then sampled tokens whose ratios go beyond every threshold."""
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=generator)

    found = []
    for length in LENGTHS:
        sampled = (torch.arange(length) >= 2).float()
        low = 0.5 + 0.4 * torch.rand(length, generator=generator)
        fields = {
            TARGET_IDS: torch.randint(0, 50, (length,), generator=generator),
            "logprobs": sampled * (normal(length) - 2.0),
            "advantages": sampled * normal(length),
            "sequence_ratio_mask": sampled,
            "weights": normal(length),
            "clip_low_threshold": low,
            "clip_high_threshold": low + 0.6,
        }
        found.append(TokenSequence(torch.randint(0, 50, (length,), generator=generator), fields))
    return found


def log_probs_of(rows: list[TokenSequence], *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    return [(torch.randn((len(row), *shape), generator=generator) - 2.0).requires_grad_() for row in rows]


def without(row: TokenSequence, *names: str) -> TokenSequence:
    return TokenSequence(row.input_ids, {name: value for name, value in row.token_fields.items() if name not in names})


def _ppo(lp: Tensor, f: Mapping[str, Tensor], low: Any = 0.8, high: Any = 1.2) -> Tensor:
    r = (lp - f["logprobs"]).exp()
    return -torch.minimum(r * f["advantages"], torch.minimum(torch.maximum(r, low), high) * f["advantages"]).sum()


def _cispo(lp: Tensor, f: Mapping[str, Tensor], low: float = 0.0, high: float = 4.0) -> Tensor:
    return -((lp - f["logprobs"]).exp().clamp(low, high).detach() * lp * f["advantages"]).sum()


def _gspo(lp: Tensor, f: Mapping[str, Tensor], low: float = 0.8, high: float = 1.2) -> Tensor:
    chosen = f["sequence_ratio_mask"] != 0
    s = (lp - f["logprobs"])[chosen].mean().exp().detach()
    s = s * lp.exp() / lp.exp().detach()
    return -torch.minimum(s * f["advantages"], s.clamp(low, high) * f["advantages"]).sum()


type Formula = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""Of one sequence."""


def _bounds(low: float, high: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(low), torch.tensor(high)


CASES: Mapping[str, tuple[LossFn, dict[str, Any], Formula]] = {
    "cross_entropy": (tinker_losses.cross_entropy, {}, lambda lp, f: -(f["weights"] * lp).sum()),
    "importance_sampling": (
        tinker_losses.importance_sampling,
        {},
        lambda lp, f: -((lp - f["logprobs"]).exp() * f["advantages"]).sum(),
    ),
    "ppo": (tinker_losses.ppo, {}, lambda lp, f: _ppo(lp, f, *_bounds(0.8, 1.2))),
    "ppo narrow": (
        tinker_losses.ppo,
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.01},
        lambda lp, f: _ppo(lp, f, *_bounds(0.95, 1.01)),
    ),
    "cispo": (tinker_losses.cispo, {}, _cispo),
    "cispo narrow": (
        tinker_losses.cispo,
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
        lambda lp, f: _cispo(lp, f, 0.7, 1.3),
    ),
    "dro": (
        tinker_losses.dro,
        {"beta": 0.3},
        lambda lp, f: -(lp * f["advantages"] - 0.15 * (lp - f["logprobs"]).square()).sum(),
    ),
    "gspo": (tinker_losses.gspo, {}, _gspo),
    "gspo narrow": (
        tinker_losses.gspo,
        {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01},
        lambda lp, f: _gspo(lp, f, 0.99, 1.01),
    ),
}
CLIPS = ("clip_low_threshold", "clip_high_threshold")


def summed(
    loss: Any, rows: list[TokenSequence], log_probs: list[Tensor], split: list[list[int]], **options: Any
) -> tuple[Tensor, float]:
    """The loss over the micro-batches of ``split``, and the sum of its metric."""
    total, metric = torch.zeros(()), 0.0
    for indices in split:
        data = pack([rows[index] for index in indices], {"dp_size": 1})
        output = ModelOutput(log_probs=torch.cat([log_probs[index] for index in indices]))
        part, metrics = loss(output, data, **options)
        total, metric = total + part, metric + float(metrics["loss:sum"][0])
    return total, metric


@pytest.mark.shows("algorithms: Tinker's losses are exact sums of its formulas, whatever the micro-batches")
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[2], [0, 3], [1]]], ids=["one", "three"])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_formulas(name: str, split: list[list[int]]) -> None:
    loss, options, formula = CASES[name]
    rows = [without(row, *CLIPS) for row in sequences()]
    log_probs = log_probs_of(rows)
    expected = torch.stack([formula(lp, row.token_fields) for lp, row in zip(log_probs, rows, strict=True)]).sum()
    gradients = torch.autograd.grad(expected, log_probs)
    found, metric = summed(loss, rows, log_probs, split, **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert metric == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    for mine, wanted in zip(torch.autograd.grad(found, log_probs), gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_thresholds_of_each_token_take_the_place_of_the_options() -> None:
    rows = sequences()
    log_probs = log_probs_of(rows)
    expected = torch.stack(
        [
            _ppo(lp, row.token_fields, *(row.token_fields[name] for name in CLIPS))
            for lp, row in zip(log_probs, rows, strict=True)
        ]
    ).sum()
    found, _ = summed(tinker_losses.ppo, rows, log_probs, [[0, 1], [2, 3]])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    one = [without(row, "clip_high_threshold") for row in rows]
    expected = torch.stack(
        [
            _ppo(lp, row.token_fields, row.token_fields["clip_low_threshold"], torch.tensor(1.2))
            for lp, row in zip(log_probs, one, strict=True)
        ]
    ).sum()
    torch.testing.assert_close(summed(tinker_losses.ppo, one, log_probs, [[0, 1, 2, 3]])[0], expected, rtol=1e-6, atol=1e-6)


def test_several_targets_have_a_weight_each() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for row in sequences():
        targets = torch.randint(0, 50, (len(row), K), generator=generator)
        targets[0], targets[1, 1:] = -100, -100
        weights = torch.randn(len(row), K, generator=generator)
        weights[0] = torch.nan  # of no target, and so not read
        rows.append(TokenSequence(row.input_ids, {TARGET_IDS: targets, "weights": weights}))
    log_probs = log_probs_of(rows, K)
    found, metric = summed(tinker_losses.cross_entropy, rows, log_probs, [[0, 1], [2, 3]])
    expected = torch.zeros(())
    for lp, row in zip(log_probs, rows, strict=True):
        asked = row.token_fields[TARGET_IDS] != -100
        expected = expected - (lp[asked] * row.token_fields["weights"][asked]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert metric == pytest.approx(expected.item(), rel=1e-6)
    gradients = torch.autograd.grad(found, log_probs), torch.autograd.grad(expected, log_probs)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_beside_tenants_with_several_targets_the_first_is_a_tokens_own(name: str) -> None:
    loss, options, _ = CASES[name]
    rows = sequences()
    log_probs = log_probs_of(rows)
    alone, _ = summed(loss, rows, log_probs, [[0, 1, 2, 3]], **options)
    padded = [
        row.with_fields({TARGET_IDS: torch.nn.functional.pad(row.token_fields[TARGET_IDS][:, None], (0, K - 1), value=-100)})
        for row in rows
    ]
    wide = [torch.cat([lp[:, None], torch.zeros(len(lp), K - 1)], dim=1) for lp in log_probs]
    assert torch.equal(summed(loss, padded, wide, [[0, 1, 2, 3]], **options)[0], alone)
    padded[2].token_fields[TARGET_IDS][4, 1] = 3
    with pytest.raises(BatchError, match="several targets for one token"):
        summed(loss, padded, wide, [[2]], **options)


@pytest.mark.parametrize("name", CASES)
def test_a_position_without_target_adds_nothing_whatever_its_fields(name: str) -> None:
    loss, options, formula = CASES[name]
    rows = [without(row, *CLIPS) for row in sequences()]
    for row in rows:
        row.token_fields[TARGET_IDS][-1] = -100
        row.token_fields["sequence_ratio_mask"][-1] = 0
    log_probs = [lp.detach() for lp in log_probs_of(rows)]
    for lp in log_probs:
        lp[-1] = 0.0  # as the head gives it
    cut = [{each: value[:-1] for each, value in row.token_fields.items()} for row in rows]
    expected = torch.stack([formula(lp[:-1], fields) for lp, fields in zip(log_probs, cut, strict=True)]).sum()
    for row in rows:
        for each in ("logprobs", "advantages", "weights"):
            row.token_fields[each][-1] = torch.nan
    found, _ = summed(loss, rows, log_probs, [[0, 1, 2, 3]], **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_ratio_that_overflows_counts_only_with_an_advantage(name: str) -> None:
    loss, options, _ = CASES[name]
    rows = [without(sequences()[0], *CLIPS)]
    rows[0].token_fields["logprobs"][0] = -1000.0
    log_probs = log_probs_of(rows)
    found, _ = summed(loss, rows, log_probs, [[0]], **options)
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert torch.isfinite(found) and torch.isfinite(gradient).all()


def test_data_parallel_ranks_average_to_the_sum() -> None:
    rows = [without(row, *CLIPS) for row in sequences()]
    log_probs = log_probs_of(rows)
    whole, _ = summed(tinker_losses.ppo, rows, log_probs, [[0, 1, 2, 3]])
    plan = plan_micro_batches(LENGTHS, 5, 11, fill=True)
    assert plan.fillers  # copies that add nothing, though a model would give them log-probs
    of_copies = plan.with_fillers(log_probs)
    of_ranks = [
        sum(
            tinker_losses.ppo(ModelOutput(log_probs=torch.cat([of_copies[index] for index in indices])), batch)[0]
            for indices, batch in zip(plan.micro_batches[rank], batches, strict=True)
        )
        for rank, batches in enumerate(pack_plan(rows, plan))
    ]
    torch.testing.assert_close(sum(of_ranks) / 5, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        (tinker_losses.cross_entropy, {"weights": torch.ones(7, 2)}, r"'weights' has shape \(7, 2\); expected \(7,\)"),
        (tinker_losses.ppo, {"advantages": torch.ones(7, 1)}, r"'advantages' has shape \(7, 1\)"),
        (tinker_losses.ppo, {"clip_low_threshold": torch.ones(7, 1)}, r"'clip_low_threshold' has shape \(7, 1\)"),
    ],
)
def test_fields_of_another_shape_are_refused_by_name(loss: Any, changes: dict[str, Tensor], message: str) -> None:
    row = sequences()[0].with_fields(changes)
    with pytest.raises(BatchError, match=message):
        loss(ModelOutput(log_probs=torch.zeros(7)), pack([row], {"dp_size": 1}))


def test_missing_fields_are_named() -> None:
    row = TokenSequence(torch.arange(4), {"weights": torch.ones(4)})
    output, data = ModelOutput(log_probs=torch.zeros(4)), pack([row], {"dp_size": 1})
    with pytest.raises(BatchError, match="token field 'target_ids' is missing"):
        tinker_losses.cross_entropy(output, data)
    data = PackedBatch(data.input_ids, data.seq_lens, {TARGET_IDS: torch.arange(4)}, meta={"dp_size": 1})
    with pytest.raises(BatchError, match="token field 'weights' is missing"):
        tinker_losses.cross_entropy(output, data)
