"""Surrogates against the papers' formulas, written without the code under test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import (
    cispo_loss,
    cispo_policy_loss,
    clipped_policy_loss,
    grpo_loss,
    gspo_loss,
    gspo_policy_loss,
    policy_loss,
    value_loss,
)
from rl_backend.contracts import ModelOutput, PackedBatch
from tests.support.rl_batches import batch_meta, pack, random_sequences


def responses(output: ModelOutput, batch: PackedBatch) -> list[tuple[Tensor, Tensor, float]]:
    """Of every sequence: log-probs and old log-probs of its selected tokens, and its one advantage."""
    fields = (output.log_probs, *(batch.token_field(name) for name in ("old_log_probs", "advantages", "loss_mask")))
    rows = []
    for log_probs, old, advantages, mask in zip(*(batch.split(field) for field in fields), strict=True):
        chosen = mask != 0
        advantage = advantages[chosen][0].item() if chosen.any() else 0.0
        rows.append((log_probs[chosen], old[chosen], advantage))
    return rows


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.15, 0.2), (10.0, 10.0)])
def test_gspo_in_token_form_is_the_papers_sequence_objective(low: float, high: float) -> None:
    sequences = random_sequences(31)
    output, batch = pack(sequences, batch_meta(sequences))
    loss, metrics = gspo_loss(output, batch, clip_ratio_low=low, clip_ratio_high=high)
    (gradient,) = torch.autograd.grad(loss, output.log_probs)

    objective = torch.zeros((), dtype=torch.float64)
    clipped_tokens = 0
    for log_probs, old, advantage in responses(output, batch):
        if len(log_probs) == 0:
            continue
        ratio = (log_probs.sum() - old.sum()).div(len(log_probs)).exp()
        clipped = ratio.clamp(1 - low, 1 + high)
        objective = objective + torch.minimum(ratio * advantage, clipped * advantage)
        clipped_tokens += len(log_probs) * int((clipped * advantage < ratio * advantage).item())
    expected = -objective / len(sequences)
    (expected_gradient,) = torch.autograd.grad(expected, output.log_probs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert metrics["clip_fraction"][0] == clipped_tokens


def test_gspo_keeps_each_tokens_own_advantage_in_its_gradient() -> None:
    log_probs = torch.tensor([-1.0, -2.0, 0.0], requires_grad=True)
    advantages = torch.tensor([1.0, -3.0, 0.0])
    losses, _ = gspo_policy_loss(log_probs, log_probs.detach(), advantages, torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3]))
    losses.sum().backward()
    assert losses.tolist() == [-1.0, 3.0, 0.0]
    assert log_probs.grad.tolist() == [-1.0, 3.0, 0.0]


def test_gspo_limits_the_sequence_ratio_to_exp_10() -> None:
    log_probs = torch.tensor([40.0, 40.0, 0.0], requires_grad=True)
    mask = torch.tensor([1.0, 1.0, 0.0])
    losses, _ = gspo_policy_loss(
        log_probs, torch.zeros(3), -mask, mask, torch.tensor([3]), clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    losses.sum().backward()
    assert losses[:2].tolist() == pytest.approx([math.exp(10.0)] * 2)
    assert not log_probs.grad.any()


@pytest.mark.parametrize(("low", "high"), [(1.0, 0.2), (0.3, 0.3)])
def test_cispo_weighs_every_tokens_gradient_with_its_clipped_ratio(low: float, high: float) -> None:
    sequences = random_sequences(32)
    output, batch = pack(sequences, batch_meta(sequences))
    loss, metrics = cispo_loss(output, batch, clip_ratio_low=low, clip_ratio_high=high)
    (gradient,) = torch.autograd.grad(loss, output.log_probs)
    mask = batch.token_field("loss_mask")
    ratio = (output.log_probs - batch.token_field("old_log_probs")).exp().detach()
    weights = ratio.clamp(1 - low, 1 + high)
    torch.testing.assert_close(gradient, -weights * batch.token_field("advantages") * mask / mask.sum())
    assert metrics["clip_fraction"][0] == ((weights != ratio) & (mask != 0)).sum() > 0
    assert (gradient[mask != 0] != 0).all()


def test_cispo_limits_the_log_ratio_to_20() -> None:
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    losses, _ = cispo_policy_loss(
        log_probs, torch.tensor([-1e4, 1e4]), torch.ones(2), torch.ones(2), clip_ratio_low=1.0, clip_ratio_high=1e9
    )
    losses.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-math.exp(20.0), -math.exp(-20.0)])


def test_the_named_losses_are_the_policy_loss_with_their_surrogate() -> None:
    sequences = random_sequences(33)
    output, batch = pack(sequences, batch_meta(sequences))
    named = {
        grpo_loss: {"surrogate": clipped_policy_loss, "clip_ratio_c": 3.0},
        gspo_loss: {
            "surrogate": gspo_policy_loss,
            "clip_ratio_low": 3e-4,
            "clip_ratio_high": 4e-4,
            "loss_agg_mode": "seq-mean-token-mean",
        },
        cispo_loss: {"surrogate": cispo_policy_loss, "clip_ratio_low": 1.0, "clip_ratio_high": 0.2},
    }
    losses = [loss_fn(output, batch)[0].item() for loss_fn in named]
    assert losses == [policy_loss(output, batch, **options)[0].item() for options in named.values()]
    assert len(set(losses)) == 3


def test_a_value_that_moved_past_the_clip_and_away_from_its_return_has_no_gradient_there() -> None:
    values = torch.tensor([2.0, 2.0, 0.6, 0.0], requires_grad=True)
    fields = {
        "loss_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "old_values": torch.tensor([0.0, 0.0, 0.5, 0.0]),
        "returns": torch.tensor([1.0, 3.0, 3.0, 0.0]),
    }
    meta = {"batch_num_tokens": 3, "global_batch_size": 1, "dp_size": 1}
    batch = PackedBatch(torch.arange(4), torch.tensor([4]), fields, {}, meta)
    loss, metrics = value_loss(ModelOutput(values=values), batch, cliprange_value=0.5)
    loss.backward()
    # Losses: max(1, 0.25), max(1, 6.25), 5.76 inside the clip; halved and averaged.
    assert loss.item() == pytest.approx((1.0 + 6.25 + 5.76) / 6)
    assert values.grad.tolist() == pytest.approx([1 / 3, 0.0, -2.4 / 3, 0.0])
    assert metrics["value_clip_fraction"] == (1.0, 3.0)
    assert metrics["value_mean"][0] == pytest.approx(4.6) and metrics["return_mean"][0] == pytest.approx(7.0)
    assert metrics["value_loss"][0] == pytest.approx(3 * loss.item())
