"""Losses on packed data: invariance to splitting, safety at masked positions, metrics and refusals."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import (
    LOSS_AGG_MODES,
    cispo_loss,
    clipped_policy_loss,
    grpo_loss,
    gspo_loss,
    kl_penalty,
    sft_loss,
    value_loss,
)
from rl_backend.contracts import Metric, ModelOutput, PackedBatch, TokenSequence, merge_metrics
from tests.support.rl_batches import batch_meta, pack, random_sequences

FULL_GRPO = partial(grpo_loss, kl_coef=0.1, tis_cap=1.5, entropy_coef=0.02, clip_ratio_high=0.28)
WIDE_GSPO = partial(gspo_loss, clip_ratio_low=0.3, clip_ratio_high=0.3)
LOSSES: list[Callable[..., Any]] = [
    *(
        partial(loss, loss_agg_mode=mode, loss_scale_factor=8.0 if mode.endswith("norm") else None)
        for loss, mode in itertools.product((FULL_GRPO, sft_loss, value_loss), LOSS_AGG_MODES)
    ),
    partial(FULL_GRPO, importance_level="sequence", kl_type="k1+", clip_ratio_c=None),
    partial(WIDE_GSPO, tis_cap=1.5, kl_coef=0.1),
    partial(WIDE_GSPO, loss_agg_mode="token-mean", importance_veto=1e-3),
    partial(cispo_loss, mis_bounds=(0.5, 2.0), importance_veto=0.3, entropy_coef=0.01),
    partial(cispo_loss, mis_bounds=(0.2, 5.0), importance_level="sequence"),
    partial(value_loss, cliprange_value=None),
]


def describe(loss_fn: Callable[..., Any]) -> str:
    options = [str(value) for name, value in loss_fn.keywords.items() if name in ("loss_agg_mode", "mis_bounds")]
    surrogate = getattr(getattr(loss_fn.func, "surrogate", loss_fn.func), "__name__", "loss")
    return "-".join([surrogate, *options])


def leaf(loss_fn: Callable[..., Any], output: ModelOutput) -> Tensor:
    """The model output that the loss trains."""
    return output.values if loss_fn.func is value_loss else output.log_probs


def loss_and_gradients(
    loss_fn: Callable[..., Any], ranks: Sequence[Sequence[Sequence[int]]], sequences: Sequence[TokenSequence]
) -> tuple[float, list[Tensor], dict[str, Metric]]:
    """What data parallelism makes of it: micro-batches added, ranks averaged; gradients by sequence."""
    meta = batch_meta(sequences, len(ranks))
    total = 0.0
    gradients: dict[int, Tensor] = {}
    metrics = []
    for micro_batches in ranks:
        for indices in micro_batches:
            output, batch = pack([sequences[index] for index in indices], meta)
            loss, values = loss_fn(output, batch)
            total += loss.item() / len(ranks)
            loss.backward()
            metrics.append({name: Metric(float(value[0]), float(value[1])) for name, value in values.items()})
            parts = batch.split(leaf(loss_fn, output).grad / len(ranks))
            gradients.update(zip(indices, parts, strict=True))
    return total, [gradients[index] for index in range(len(sequences))], merge_metrics(metrics)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=describe)
def test_any_split_into_micro_batches_and_ranks_gives_the_same_loss_gradient_and_metrics(loss_fn: Callable) -> None:
    sequences = random_sequences(8)
    loss, gradients, metrics = loss_and_gradients(loss_fn, [[range(len(sequences))]], sequences)
    trained = [index for index, gradient in enumerate(gradients) if gradient.abs().sum() > 0]
    assert len(trained) >= 3 and 3 not in trained
    shuffle = random.Random(0)
    for num_ranks, num_micro_batches in [(1, 6), (2, 1), (2, 3), (3, 2), (6, 1)]:
        order = list(range(len(sequences)))
        shuffle.shuffle(order)
        pieces = num_ranks * num_micro_batches
        cut = [order[piece::pieces] for piece in range(pieces)]
        ranks = [cut[rank::num_ranks] for rank in range(num_ranks)]
        split_loss, split_gradients, split_metrics = loss_and_gradients(loss_fn, ranks, sequences)
        assert split_loss == pytest.approx(loss, rel=1e-12)
        for split_gradient, gradient in zip(split_gradients, gradients, strict=True):
            torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-15)
        for name, metric in metrics.items():
            assert split_metrics[name].mean == pytest.approx(metric.mean, rel=1e-12), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loss_fn", LOSSES, ids=describe)
def test_values_at_masked_positions_reach_neither_loss_nor_gradient_nor_metrics(loss_fn: Callable, bad: float) -> None:
    sequences = random_sequences(9)
    meta = batch_meta(sequences)
    output, batch = pack(sequences, meta)
    clean, clean_metrics = loss_fn(output, batch)
    clean.backward()

    masked = batch.token_field("loss_mask") == 0
    fields = {
        name: value if name == "loss_mask" else value.masked_fill(masked, bad) for name, value in batch.token_fields.items()
    }
    spoilt_output = ModelOutput(
        *(value.detach().masked_fill(masked, bad).requires_grad_() for value in output if value is not None)
    )
    spoilt_batch = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, meta)
    loss, metrics = loss_fn(spoilt_output, spoilt_batch)
    loss.backward()
    assert loss.item() == clean.item()
    gradient, clean_gradient = leaf(loss_fn, spoilt_output).grad, leaf(loss_fn, output).grad
    assert torch.equal(gradient, clean_gradient)
    assert (gradient[masked] == 0).all() and (gradient != 0).any()
    for name, (total, weight) in metrics.items():
        assert (total.item(), weight.item()) == (clean_metrics[name][0].item(), clean_metrics[name][1].item()), name


@pytest.mark.parametrize("loss_fn", LOSSES, ids=describe)
def test_metrics_hold_no_graph(loss_fn: Callable) -> None:
    sequences = random_sequences(9)
    _, metrics = loss_fn(*pack(sequences, batch_meta(sequences)))
    assert not any(value.requires_grad for pair in metrics.values() for value in pair)


def test_token_losses_are_zero_at_masked_positions_whatever_stands_there() -> None:
    nan = torch.full((3,), float("nan"))
    mask = torch.tensor([0.0, 1.0, 0.0])
    good = torch.tensor([0.0, -1.0, 0.0])
    values = torch.where(mask != 0, good, nan)
    losses, _ = clipped_policy_loss(values, values, values, mask)
    assert losses.tolist() == [0.0, 1.0, 0.0]


def test_nll_is_the_mean_over_selected_tokens_in_nats() -> None:
    sequences = random_sequences(9)
    output, batch = pack(sequences, batch_meta(sequences))
    loss, metrics = sft_loss(output, batch)
    total, weight = metrics["nll"]
    assert (total / weight).item() == pytest.approx(loss.item()) and loss.item() > 0


@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_enormous_log_ratios_leave_loss_and_gradient_finite_in_float32(gap: float) -> None:
    sequences = random_sequences(10, torch.float32)
    output, batch = pack(sequences, batch_meta(sequences))
    shifted = ModelOutput((output.log_probs.detach() + gap).requires_grad_(), output.entropy)
    loss, _ = FULL_GRPO(shifted, batch)
    loss.backward()
    assert loss.isfinite() and shifted.log_probs.grad.isfinite().all()


def test_on_policy_the_gradient_is_that_of_advantage_times_log_prob() -> None:
    sequences = random_sequences(11)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = {**batch.token_fields, "old_log_probs": output.log_probs.detach()}
    batch = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta)
    loss, metrics = grpo_loss(output, batch)
    loss.backward()
    expected = -fields["advantages"] * fields["loss_mask"] / batch.meta["batch_num_tokens"]
    torch.testing.assert_close(output.log_probs.grad, expected)
    assert metrics["clip_fraction"][0] == 0 and metrics["approx_kl"][0] == 0


def test_a_gain_past_the_upper_clip_gives_no_gradient_and_a_dual_clipped_loss_neither() -> None:
    sequence = TokenSequence.from_prompt_and_response(
        [1], [2, 3, 4], response_fields={"old_log_probs": [0.0, 0.0, 0.0], "advantages": [1.0, -1.0, -1.0]}
    )
    log_probs = torch.tensor([0.5, 0.5, 2.0, 0.0], requires_grad=True)
    _, batch = pack(
        [sequence.with_fields({"log_probs": torch.zeros(4), "entropy": torch.zeros(4)})],
        {"batch_num_tokens": 3, "global_batch_size": 1, "dp_size": 1},
    )
    loss, metrics = grpo_loss(ModelOutput(log_probs), batch)
    loss.backward()
    assert log_probs.grad.tolist() == pytest.approx([0.0, torch.tensor(0.5).exp().item() / 3, 0.0, 0.0])
    assert metrics["clip_fraction"][0] == 1 and metrics["clip_fraction_lower"][0] == 1
    log_probs.grad = None
    loss, metrics = grpo_loss(ModelOutput(log_probs), batch, clip_ratio_c=None)
    loss.backward()
    assert log_probs.grad[2].item() == pytest.approx(torch.tensor(2.0).exp().item() / 3)
    assert "clip_fraction_lower" not in metrics


def test_advantages_may_be_one_number_per_sequence() -> None:
    sequences = random_sequences(12)
    output, batch = pack(sequences, batch_meta(sequences))
    per_sequence = torch.stack(
        [
            part[mask != 0][0] if mask.any() else part.new_zeros(())
            for part, mask in zip(
                batch.split(batch.token_field("advantages")), batch.split(batch.token_field("loss_mask")), strict=True
            )
        ]
    )
    fields = {name: value for name, value in batch.token_fields.items() if name != "advantages"}
    by_sequence = PackedBatch(batch.input_ids, batch.seq_lens, fields, {"advantages": per_sequence}, batch.meta)
    assert grpo_loss(output, by_sequence)[0].item() == grpo_loss(output, batch)[0].item()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_the_loss_mask_may_have_any_dtype(dtype: torch.dtype) -> None:
    sequences = random_sequences(13)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = {**batch.token_fields, "loss_mask": batch.token_field("loss_mask").to(dtype)}
    other = PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta)
    for loss_fn in LOSSES:
        loss, metrics = loss_fn(output, batch)
        other_loss, other_metrics = loss_fn(output, other)
        assert other_loss.item() == loss.item()
        assert other_metrics.keys() == metrics.keys()


def test_the_log_prob_gap_is_reported_whenever_the_batch_has_rollout_log_probs() -> None:
    sequences = random_sequences(14)
    output, batch = pack(sequences, batch_meta(sequences))
    _, metrics = grpo_loss(output, batch)
    mask = batch.token_field("loss_mask") != 0
    gap = (batch.token_field("old_log_probs") - batch.token_field("rollout_log_probs"))[mask].abs()
    total, weight = metrics["log_prob_gap"]
    assert (total / weight).item() == pytest.approx(gap.mean().item())
    fields = {name: value for name, value in batch.token_fields.items() if name != "rollout_log_probs"}
    _, metrics = grpo_loss(output, PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta))
    assert "log_prob_gap" not in metrics


def test_the_kl_from_the_policy_that_sampled_is_the_exact_one_where_every_token_counts_as_often_as_it_is_sampled() -> None:
    scores = 0.5 * torch.randn(2, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sampling, trained = scores.log_softmax(1)
    exact = (sampling.exp() * (sampling - trained)).sum().item()
    fields = {
        "old_log_probs": trained,
        "rollout_log_probs": sampling,
        "loss_mask": sampling.exp(),
        "advantages": torch.zeros_like(trained),
    }
    batch = PackedBatch(torch.arange(40), torch.tensor([40]), fields, {}, {"batch_num_tokens": 1.0, "dp_size": 1})
    _, metrics = grpo_loss(ModelOutput(trained.clone().requires_grad_()), batch)
    total, weight = metrics["rollout_kl"]
    assert (total / weight).item() == pytest.approx(exact) and exact > 0.1


def test_the_entropy_of_the_pass_before_the_updates_is_a_metric_unless_the_model_gives_its_own() -> None:
    sequences = random_sequences(18)
    output, batch = pack(sequences, batch_meta(sequences))
    mask = batch.token_field("loss_mask")
    old = torch.linspace(0.0, 2.0, len(mask), dtype=torch.float64)
    with_old = PackedBatch(batch.input_ids, batch.seq_lens, {**batch.token_fields, "old_entropy": old}, {}, batch.meta)
    alone = ModelOutput(output.log_probs)
    for given, data, expected in (
        (alone, with_old, old),
        (output, with_old, output.entropy),
        (output, batch, output.entropy),
    ):
        total, weight = gspo_loss(given, data)[1]["entropy"]
        assert (total / weight).item() == pytest.approx(((expected * mask).sum() / mask.sum()).item())
    assert "entropy" not in grpo_loss(alone, batch)[1]
    assert torch.equal(*(torch.autograd.grad(grpo_loss(alone, data)[0], output.log_probs)[0] for data in (batch, with_old)))


@pytest.mark.parametrize(
    "loss",
    [
        partial(grpo_loss, clip_ratio_c=2.0, kl_coef=0.1, entropy_coef=0.02),
        partial(grpo_loss, tis_cap=1.5, loss_agg_mode="seq-mean-token-mean"),
        partial(gspo_loss, mis_bounds=(0.5, 2.0), importance_level="sequence"),
        partial(cispo_loss, importance_veto=0.3),
    ],
)
def test_on_policy_loss_gradient_and_metrics_are_those_of_old_log_probs_of_the_pass_itself(loss: partial[Any]) -> None:
    sequences = random_sequences(19)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = {name: value for name, value in batch.token_fields.items() if name != "old_log_probs"}
    before = {**fields, "old_log_probs": output.log_probs.detach().clone()}
    found = []
    for options, given in (
        ({}, before),
        ({"on_policy": True}, fields),
        # Those of another pass are not read.
        ({"on_policy": True}, batch.token_fields | {"old_entropy": torch.full_like(output.log_probs, 9.0)}),
    ):
        model = ModelOutput(*(value.detach().clone().requires_grad_() for value in output[:2]))
        value, metrics = loss.func.with_options(**loss.keywords, **options)(model, replace(batch, token_fields=given))
        value.backward()
        assert not any(isinstance(each, Tensor) and each.requires_grad for pair in metrics.values() for each in pair)
        found.append((value.detach(), model.log_probs.grad, metrics))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0)
    assert {"log_prob_gap", "rollout_kl", "entropy", "clip_fraction", "approx_kl"} <= found[1][2].keys()


def test_the_straight_through_kl_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    log_probs = torch.tensor([-1.0, -2.5], requires_grad=True)
    ref = torch.tensor([-1.5, -2.0])
    value = kl_penalty(log_probs, ref, "k3+")
    value.sum().backward()
    torch.testing.assert_close(value, kl_penalty(log_probs, ref, "k3"))
    torch.testing.assert_close(log_probs.grad, log_probs.detach() - ref)


@pytest.mark.parametrize(
    ("kl_type", "divergence"), [("k1", None), ("k2", "reverse"), ("k3+", "reverse"), ("k1+", "reverse"), ("k3", "forward")]
)
def test_gradients_of_the_kl_estimates_are_those_of_the_divergence_that_is_documented(
    kl_type: str, divergence: str | None
) -> None:
    scores = 0.5 * torch.randn(2, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    policy, reference = scores[0].requires_grad_(), scores[1].log_softmax(0)

    def gradient(value: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(value(policy.log_softmax(0)), policy)[0]

    # Each token counts as often as the policy samples it, and that share itself has no gradient.
    found = gradient(lambda logs: (logs.exp().detach() * kl_penalty(logs, reference, kl_type)).sum())
    right = {
        None: lambda logs: 0.0 * logs.sum(),
        "reverse": lambda logs: (logs.exp() * (logs - reference)).sum(),
        "forward": lambda logs: -(reference.exp() * logs).sum(),
    }[divergence]
    torch.testing.assert_close(found, gradient(right))


@pytest.mark.parametrize("kl_type", ["k3", "low_var_kl", "k3+"])
@pytest.mark.parametrize("distance", [1e-5, 1e-4, 1e-3])
def test_k3_of_policies_near_each_other_is_no_rounding_error(kl_type: str, distance: float) -> None:
    log_probs = -torch.linspace(0.01, 6.0, 1000)
    ref = log_probs - distance * torch.linspace(-1.0, 1.0, 1000)
    found, difference = kl_penalty(log_probs, ref, kl_type), log_probs.double() - ref.double()
    assert bool((found >= 0).all())
    assert found.mean().item() == pytest.approx((0.5 * difference.square()).mean().item(), rel=0.02)


def test_the_kl_metric_of_a_policy_near_its_reference_is_their_kl() -> None:
    sequences = random_sequences(21)
    output, batch = pack(sequences, batch_meta(sequences))
    log_probs = output.log_probs.detach()
    fields = {**batch.token_fields, "ref_log_probs": log_probs + 1e-4}
    _, metrics = grpo_loss(output, PackedBatch(batch.input_ids, batch.seq_lens, fields, {}, batch.meta), kl_coef=0.1)
    total, weight = metrics["kl"]
    assert (total / weight).item() == pytest.approx(0.5e-8, rel=0.02)


def test_losses_with_options_survive_pickling() -> None:
    sequences = random_sequences(19)
    output, batch = pack(sequences, batch_meta(sequences))
    copied = pickle.loads(pickle.dumps(FULL_GRPO))
    assert copied(output, batch)[0].item() == FULL_GRPO(output, batch)[0].item()
