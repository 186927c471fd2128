"""Importance weights: against verl's, their effect in a loss, and refusals."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_backend.algorithm import (
    cispo_loss,
    grpo_loss,
    gspo_loss,
    masked_importance_weights,
    sequences_without_veto,
    truncated_importance_weights,
)
from rl_backend.contracts import BatchError, ConfigError, PackedBatch
from tests.support.rl_batches import batch_meta, pack, pad, random_sequences
from tests.support.verl_reference import assert_same


@pytest.fixture(scope="module")
def rollout_corr() -> ModuleType:
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", reason="verl is not installed")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("cap", [0.9, 2.0])
def test_truncated_importance_weights_equal_verls(rollout_corr: ModuleType, level: str, cap: float) -> None:
    _, batch = pack(random_sequences(4), {})
    old, rollout = batch.token_field("old_log_probs"), batch.token_field("rollout_log_probs")
    mask = batch.token_field("loss_mask")
    ours = truncated_importance_weights(old, rollout, mask, batch.seq_lens, cap=cap, level=level)
    theirs, _ = rollout_corr.compute_rollout_correction_weights(
        pad(old - rollout, batch), pad(mask, batch), rollout_is=level, rollout_is_threshold=cap
    )
    assert_same(pad(ours, batch), theirs)
    assert (ours == cap).any() and ((ours > 0) & (ours < cap)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.8, 1.1)])
def test_masked_importance_weights_equal_verls(
    rollout_corr: ModuleType, bounds: tuple[float, float], level: str, dtype: torch.dtype
) -> None:
    _, batch = pack(random_sequences(4, dtype), {})
    old, rollout = batch.token_field("old_log_probs"), batch.token_field("rollout_log_probs")
    mask = batch.token_field("loss_mask")
    ours = masked_importance_weights(old, rollout, mask, batch.seq_lens, bounds=bounds, level=level)
    theirs, _ = rollout_corr.compute_rollout_correction_weights(
        pad(old - rollout, batch), pad(mask, batch), rollout_is=level, rollout_is_threshold=f"{bounds[0]}_{bounds[1]}"
    )
    assert_same(pad(ours, batch), theirs)
    assert ((ours == 0) & (mask != 0)).any() and (ours > 0).any()


def test_the_veto_drops_the_sequences_that_verl_drops(rollout_corr: ModuleType) -> None:
    _, batch = pack(random_sequences(4), {})
    # verl's seq_max_k2 also drops tokens that the trainer holds for too likely: with none of these they agree.
    gap = -(batch.token_field("old_log_probs") - batch.token_field("rollout_log_probs")).abs()
    mask = batch.token_field("loss_mask")
    kept = sequences_without_veto(gap, torch.zeros_like(gap), mask, batch.seq_lens, veto=0.45)
    theirs, _ = rollout_corr.compute_rollout_rejection_mask(
        pad(gap, batch), pad(mask, batch), "seq_max_k2", 0.5 * math.log(0.45) ** 2
    )
    assert torch.equal(pad(mask * kept, batch), theirs)
    assert 0 < theirs.sum() < mask.sum()


def test_importance_weights_are_constants_limited_to_exp_20() -> None:
    old = torch.tensor([50.0, -50.0, 0.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1.0, 1.0, 0.0])
    weights = truncated_importance_weights(old, torch.zeros(3), mask, torch.tensor([3]), cap=1e12)
    expected = torch.tensor([20.0, -20.0], dtype=torch.float64).exp().tolist()
    assert weights.tolist() == pytest.approx([*expected, 0.0])
    assert not weights.requires_grad


def test_masking_by_sequence_drops_whole_sequences_and_by_token_single_tokens() -> None:
    log_ratio = torch.tensor([0.0, 0.5, 0.5, 0.0, -0.1, 0.05])
    mask, seq_lens = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]), torch.tensor([3, 3])
    by_token = masked_importance_weights(log_ratio, torch.zeros(6), mask, seq_lens, bounds=(0.5, 2.0))
    by_sequence = masked_importance_weights(log_ratio, torch.zeros(6), mask, seq_lens, bounds=(0.5, 2.0), level="sequence")
    assert (by_token != 0).tolist() == [False, True, True, False, True, True]
    assert (by_sequence != 0).tolist() == [False, False, False, False, True, True]
    assert by_sequence[4:].tolist() == pytest.approx([math.exp(-0.05)] * 2)


def test_one_impossible_token_vetoes_its_sequence_whether_weights_are_used_or_not() -> None:
    sequences = random_sequences(4)
    output, batch = pack(sequences, batch_meta(sequences))
    rollout = batch.token_field("rollout_log_probs").clone()
    rollout[4] = batch.token_field("old_log_probs")[4] + 20.0
    assert batch.token_field("loss_mask")[4] == 1
    fields = {**batch.token_fields, "rollout_log_probs": rollout}
    batch = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta)
    for options in ({}, {"tis_cap": 2.0}):
        output.log_probs.grad = None
        loss, metrics = grpo_loss(output, batch, importance_veto=1e-4, **options)
        loss.backward()
        first, *others = batch.split(output.log_probs.grad)
        assert not first.any() and any(gradient.any() for gradient in others)
        dropped, tokens = metrics["importance_dropped"]
        assert (dropped, tokens) == (batch.split(batch.token_field("loss_mask"))[0].sum(), batch.meta["batch_num_tokens"])


@pytest.mark.parametrize("veto", [None, 0.67])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("option", "value", "function", "keyword"),
    [
        ("tis_cap", 1.1, truncated_importance_weights, "cap"),
        ("mis_bounds", (0.5, 1.7), masked_importance_weights, "bounds"),
    ],
)
def test_weights_multiply_the_gradient_and_dropped_tokens_stay_in_the_denominator(
    option: str, value: Any, function: Any, keyword: str, level: str, veto: float | None
) -> None:
    sequences = random_sequences(5)
    output, batch = pack(sequences, batch_meta(sequences))
    old, rollout, mask = (batch.token_field(name) for name in ("old_log_probs", "rollout_log_probs", "loss_mask"))
    weights = function(old, rollout, mask, batch.seq_lens, level=level, **{keyword: value})
    kept = torch.ones_like(mask, dtype=torch.bool)
    if veto:
        kept = sequences_without_veto(old, rollout, mask, batch.seq_lens, veto=veto)
        assert (weights[~kept] != 0).any() and ((weights[kept] != 0) & (weights[kept] != 1)).any()
    loss, metrics = cispo_loss(output, batch, importance_level=level, importance_veto=veto, **{option: value})
    (gradient,) = torch.autograd.grad(loss, output.log_probs)
    (plain,) = torch.autograd.grad(cispo_loss(output, batch)[0], output.log_probs)
    torch.testing.assert_close(gradient, plain * weights * kept)
    total, weight = metrics["importance_weight"]
    assert (total, weight) == (pytest.approx((weights * kept).sum().item()), mask.sum())


@pytest.mark.parametrize("loss_fn", [grpo_loss, gspo_loss, cispo_loss])
@pytest.mark.parametrize("options", [{"tis_cap": 2.0}, {"mis_bounds": (0.5, 2.0)}, {"importance_veto": 0.1}])
def test_an_importance_option_asks_for_the_rollouts_log_probs(loss_fn: Any, options: dict[str, Any]) -> None:
    sequences = random_sequences(6)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = {name: value for name, value in batch.token_fields.items() if name != "rollout_log_probs"}
    batch = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta)
    loss_fn(output, batch)
    with pytest.raises(BatchError, match="'rollout_log_probs' is missing"):
        loss_fn(output, batch, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tis_cap": 0.0}, "tis_cap=0.0"),
        ({"tis_cap": float("inf")}, "tis_cap=inf"),
        ({"tis_cap": 2.0, "mis_bounds": (0.5, 2.0)}, "not both"),
        ({"mis_bounds": (0.2, 0.28)}, r"mis_bounds=\(0.2, 0.28\)"),
        ({"mis_bounds": (1.5, 2.0)}, "mis_bounds"),
        ({"mis_bounds": (-0.1, 2.0)}, "mis_bounds"),
        ({"mis_bounds": (0.5, float("inf"))}, "mis_bounds"),
        ({"mis_bounds": (0.5,)}, "mis_bounds"),
        ({"tis_cap": 2.0, "importance_level": "word"}, "importance_level='word'"),
        ({"importance_level": "sequence"}, "importance_level='sequence': needs tis_cap or mis_bounds"),
        ({"importance_veto": 0.0}, "importance_veto=0.0"),
        ({"importance_veto": 1.0}, "importance_veto=1.0"),
        ({"importance_veto": float("nan")}, "importance_veto=nan"),
    ],
)
def test_importance_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    sequences = random_sequences(6)
    output, batch = pack(sequences, batch_meta(sequences))
    with pytest.raises(ConfigError, match=message):
        grpo_loss(output, batch, **options)


def test_sampled_tokens_that_the_model_would_cut_are_counted_where_they_are_trained() -> None:
    sequences = random_sequences(3)
    output, batch = pack(sequences, batch_meta(sequences))
    mask = batch.token_field("loss_mask")
    _, metrics = grpo_loss(output, batch)
    assert "mask_disagreement" not in metrics
    _, metrics = grpo_loss(output._replace(mask_disagreement=(torch.arange(batch.num_tokens) % 3 == 0).float()), batch)
    assert metrics["mask_disagreement"] == (mask[::3].sum(), batch.meta["batch_num_tokens"])
