"""Values and gradients of the algorithms against verl's own functions, padded there and packed here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rl_backend.algorithm import (
    LOSS_AGG_MODES,
    aggregate_loss,
    cispo_loss,
    grpo_loss,
    gspo_loss,
    kl_penalty,
    sft_loss,
    value_loss,
)
from tests.support.rl_batches import LENGTHS, batch_meta, pack, pad, random_sequences
from tests.support.verl_reference import actor_config, assert_same, gradient

pytest.importorskip("verl", reason="verl is not installed")

SCALE = 12.0
VERL_MODES = [mode for mode in LOSS_AGG_MODES if mode != "sum"]  # which verl does not have


@pytest.fixture(scope="module")
def core_algos() -> ModuleType:
    import verl.trainer.ppo.core_algos

    return verl.trainer.ppo.core_algos


@pytest.fixture(scope="module")
def rollout_corr() -> ModuleType:
    import verl.trainer.ppo.rollout_corr_helper

    return verl.trainer.ppo.rollout_corr_helper


@pytest.fixture(scope="module")
def verl_losses() -> ModuleType:
    import verl.workers.utils.losses

    return verl.workers.utils.losses


def scale_factor(mode: str) -> float | None:
    return SCALE if mode == "seq-mean-token-sum-norm" else None


@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("dp_size", [1, 4])
def test_aggregated_loss_and_gradient_equal_verls(core_algos: ModuleType, mode: str, dp_size: int) -> None:
    sequences = random_sequences(1)
    output, batch = pack(sequences, batch_meta(sequences, dp_size))
    mask = batch.token_field("loss_mask")
    ours = aggregate_loss(output.log_probs, mask, batch, mode, loss_scale_factor=scale_factor(mode))
    theirs = core_algos.agg_loss(
        pad(output.log_probs, batch), pad(mask, batch), mode, loss_scale_factor=scale_factor(mode), **batch.meta
    )
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))


@pytest.mark.parametrize("kl_type", ["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs", "k1+", "k2+", "k3+", "abs+"])
def test_kl_and_its_gradient_equal_verls(core_algos: ModuleType, kl_type: str) -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = torch.randn(200, generator=generator, dtype=torch.float64)
    log_probs[:8] = torch.tensor([-30.0, 30.0, -20.0, 20.0, -2.9, 2.9, 0.0, -1e-9])
    log_probs.requires_grad_()
    ref = torch.zeros(200, dtype=torch.float64)
    ref[8:] = torch.randn(192, generator=generator, dtype=torch.float64)
    ours, theirs = kl_penalty(log_probs, ref, kl_type), core_algos.kl_penalty(log_probs, ref, kl_type)
    assert_same(ours, theirs)
    assert_same(gradient(ours.sum(), log_probs), gradient(theirs.sum(), log_probs))


@pytest.mark.shows("algorithms: PPO with dual clip, GSPO and CISPO equal verl's functions, gradients included")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize(
    ("loss_fn", "verl_name", "clip"),
    [
        (grpo_loss, "vanilla", (0.2, 0.2, 3.0)),
        (grpo_loss, "vanilla", (0.1, 0.3, 1.2)),
        (grpo_loss, "vanilla", (0.0, 0.28, 10.0)),
        (gspo_loss, "gspo", (3e-4, 4e-4, None)),
        (gspo_loss, "gspo", (0.2, 0.25, None)),
        (cispo_loss, "cispo", (1.0, 0.2, None)),
        (cispo_loss, "cispo", (0.3, 0.5, None)),
    ],
)
def test_policy_losses_gradients_and_metrics_equal_verls(
    core_algos: ModuleType,
    loss_fn: Any,
    verl_name: str,
    clip: tuple[float, float, float | None],
    mode: str,
    dtype: torch.dtype,
) -> None:
    sequences = random_sequences(2, dtype)
    output, batch = pack(sequences, batch_meta(sequences, 2))
    options = {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1]}
    if clip[2] is not None:
        options["clip_ratio_c"] = clip[2]
    ours, metrics = loss_fn(output, batch, loss_agg_mode=mode, loss_scale_factor=scale_factor(mode), **options)
    info = {**batch.meta, "loss_scale_factor": scale_factor(mode)}
    theirs, their_metrics = getattr(core_algos, f"compute_policy_loss_{verl_name}")(
        pad(batch.token_field("old_log_probs"), batch),
        pad(output.log_probs, batch),
        pad(batch.token_field("advantages"), batch),
        pad(batch.token_field("loss_mask"), batch),
        loss_agg_mode=mode,
        config=actor_config(info, **options),
    )
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))
    names = {"clip_fraction": "actor/pg_clipfrac", "approx_kl": "actor/ppo_kl"}
    if "clip_ratio_c" in options:
        names["clip_fraction_lower"] = "actor/pg_clipfrac_lower"
    for name, their_name in names.items():
        total, weight = metrics[name]
        assert (total / weight).item() == pytest.approx(their_metrics[their_name], rel=1e-5, abs=1e-7), name
    assert 0 < metrics["clip_fraction"][0] < metrics["clip_fraction"][1]


@pytest.mark.parametrize("loss_fn", [gspo_loss, cispo_loss])
def test_importance_weights_multiply_gspo_and_cispo_as_in_verl(
    core_algos: ModuleType, rollout_corr: ModuleType, loss_fn: Any
) -> None:
    sequences = random_sequences(3)
    output, batch = pack(sequences, batch_meta(sequences))
    fields = batch.token_fields
    mask = pad(fields["loss_mask"], batch)
    weights, _ = rollout_corr.compute_rollout_correction_weights(
        pad(fields["old_log_probs"] - fields["rollout_log_probs"], batch), mask, rollout_is_threshold="0.7_1.4"
    )
    ours, metrics = loss_fn(output, batch, clip_ratio_low=0.1, clip_ratio_high=0.1, mis_bounds=(0.7, 1.4))
    gspo = loss_fn is gspo_loss
    theirs, _ = getattr(core_algos, "compute_policy_loss_gspo" if gspo else "compute_policy_loss_cispo")(
        pad(fields["old_log_probs"], batch),
        pad(output.log_probs, batch),
        pad(fields["advantages"], batch),
        mask,
        config=actor_config(batch.meta, clip_ratio_low=0.1, clip_ratio_high=0.1),
        rollout_is_weights=weights,
    )
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))
    dropped = ((weights == 0) & (mask != 0)).sum()
    assert metrics["importance_dropped"][0] == dropped > 0


@pytest.mark.shows("algorithms: the clipped value loss equals verl's, gradients included")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize("cliprange", [0.2, 0.5, 5.0])
def test_value_loss_gradient_and_metrics_equal_verls(
    core_algos: ModuleType, cliprange: float, mode: str, dtype: torch.dtype
) -> None:
    sequences = random_sequences(8, dtype)
    output, batch = pack(sequences, batch_meta(sequences, 2))
    ours, metrics = value_loss(
        output, batch, cliprange_value=cliprange, loss_agg_mode=mode, loss_scale_factor=scale_factor(mode)
    )
    theirs, their_fraction = core_algos.compute_value_loss(
        pad(output.values, batch),
        pad(batch.token_field("returns"), batch),
        pad(batch.token_field("old_values"), batch),
        pad(batch.token_field("loss_mask"), batch),
        cliprange_value=cliprange,
        loss_agg_mode=mode,
        loss_scale_factor=scale_factor(mode),
        **batch.meta,
    )
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.values), gradient(theirs, output.values))
    total, weight = metrics["value_clip_fraction"]
    assert (total / weight).item() == pytest.approx(their_fraction.item(), abs=1e-7)
    assert (total > 0) == (cliprange < 5)


@pytest.mark.shows("algorithms: GRPO, KL, importance weights and SFT equal verl's functions, gradients included")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_whole_grpo_loss_equals_verls_ppo_loss(verl_losses: ModuleType, rollout_corr: ModuleType, mode: str) -> None:
    sequences = random_sequences(6)
    output, batch = pack(sequences, batch_meta(sequences, 2))
    ours, _ = grpo_loss(
        output,
        batch,
        clip_ratio_high=0.28,
        loss_agg_mode=mode,
        loss_scale_factor=scale_factor(mode),
        kl_coef=0.05,
        kl_type="k3+",
        tis_cap=1.5,
        entropy_coef=0.01,
    )

    def responses(packed: Tensor) -> Tensor:
        parts = [part[prompt - 1 : -1] for part, (prompt, _) in zip(batch.split(packed), LENGTHS, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    def prompts(packed: Tensor) -> Tensor:
        parts = [part[:prompt] for part, (prompt, _) in zip(batch.split(packed), LENGTHS, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    fields = batch.token_fields
    mask = responses(fields["loss_mask"])
    weights, _ = rollout_corr.compute_rollout_correction_weights(
        torch.nested.to_padded_tensor(responses(fields["old_log_probs"] - fields["rollout_log_probs"]), 0.0),
        torch.nested.to_padded_tensor(mask, 0.0),
        rollout_is_threshold=1.5,
    )
    data = TensorDict(
        {
            "prompts": prompts(batch.input_ids),
            "responses": responses(batch.input_ids),
            "response_mask": mask,
            "old_log_probs": responses(fields["old_log_probs"]),
            "ref_log_prob": responses(fields["ref_log_probs"]),
            "advantages": responses(fields["advantages"]),
            "rollout_is_weights": torch.nested.as_nested_tensor(
                [row[:response] for row, (_, response) in zip(weights, LENGTHS, strict=True)], layout=torch.jagged
            ),
        },
        batch_size=[len(LENGTHS)],
    )
    for name, value in batch.meta.items():
        data.set_non_tensor(name, value)
    config = actor_config(
        {},
        clip_ratio_high=0.28,
        loss_agg_mode=mode,
        loss_scale_factor=scale_factor(mode),
        use_kl_loss=True,
        kl_loss_coef=0.05,
        kl_loss_type="k3+",
        entropy_coeff=0.01,
    )
    theirs, _ = verl_losses.ppo_loss(config, {"log_probs": output.log_probs, "entropy": output.entropy}, data)
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))
    assert_same(gradient(ours, output.entropy), gradient(theirs, output.entropy))


def test_sft_loss_and_gradient_equal_verls(verl_losses: ModuleType) -> None:
    sequences = random_sequences(7)
    output, batch = pack(sequences, batch_meta(sequences, 2))
    ours, _ = sft_loss(output, batch)

    def jagged(packed: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(packed, offsets=batch.cu_seqlens.long())

    # verl's mask marks the tokens themselves and is rolled inside its loss.
    marks_tokens = torch.roll(batch.token_field("loss_mask"), 1)
    data = TensorDict({"loss_mask": jagged(marks_tokens)}, batch_size=[batch.num_sequences])
    for name, value in batch.meta.items():
        data.set_non_tensor(name, value)
    theirs, _ = verl_losses.sft_loss(None, {"log_probs": jagged(output.log_probs)}, data)
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))
