"""Values and gradients of the algorithms against verl's own functions, padded there and packed here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rl_backend.algorithm import (
    ADVANTAGE_ESTIMATORS,
    LOSS_AGG_MODES,
    aggregate_loss,
    grpo_loss,
    kl_penalty,
    sft_loss,
    truncated_importance_weights,
)
from tests.support.rl_batches import LENGTHS, batch_meta, pack, pad, random_sequences

pytest.importorskip("verl", reason="verl is not installed")

SCALE = 12.0


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


def actor_config(meta: dict[str, Any], **changes: Any) -> Any:
    from verl.workers.config import ActorConfig

    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "global_batch_info": dict(meta)}
    return ActorConfig(**{**settings, **changes})


def scale_factor(mode: str) -> float | None:
    return SCALE if mode == "seq-mean-token-sum-norm" else None


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return result


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    rtol, atol = (1e-6, 1e-9) if ours.dtype == torch.float64 else (1e-5, 1e-6)
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("name", "verl_name", "verl_options"),
    [
        ("grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": True}),
        ("dr_grpo", "compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "compute_rloo_outcome_advantage", {}),
    ],
)
def test_group_advantages_equal_verls(
    core_algos: ModuleType, name: str, verl_name: str, verl_options: dict[str, bool], dtype: torch.dtype
) -> None:
    uids = ["a", "b", "a", "c", "b", "a", "d", "d", "b", "a"]
    rewards = torch.randn(len(uids), generator=torch.Generator().manual_seed(3), dtype=dtype)
    token_rewards = torch.zeros(len(uids), 4, dtype=dtype)
    token_rewards[:, 2] = rewards
    theirs, _ = getattr(core_algos, verl_name)(token_rewards.clone(), torch.ones_like(token_rewards), uids, **verl_options)
    ours = ADVANTAGE_ESTIMATORS[name](rewards, group_ids=uids)
    assert ours.dtype == dtype
    assert_same(ours, theirs[:, 0])
    assert ours[uids.index("c")] == pytest.approx(rewards[uids.index("c")].item(), rel=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
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


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("clip", [(0.2, 0.2, 3.0), (0.1, 0.3, 1.2), (0.0, 0.28, 10.0)])
def test_clipped_policy_loss_gradient_and_metrics_equal_verls(
    core_algos: ModuleType, mode: str, clip: tuple[float, float, float]
) -> None:
    sequences = random_sequences(2)
    output, batch = pack(sequences, batch_meta(sequences, 2))
    low, high, dual = clip
    options = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": dual}
    ours, metrics = grpo_loss(output, batch, loss_agg_mode=mode, loss_scale_factor=scale_factor(mode), **options)
    info = {**batch.meta, "loss_scale_factor": scale_factor(mode)}
    theirs, their_metrics = core_algos.compute_policy_loss_vanilla(
        pad(batch.token_field("old_log_probs"), batch),
        pad(output.log_probs, batch),
        pad(batch.token_field("advantages"), batch),
        pad(batch.token_field("loss_mask"), batch),
        loss_agg_mode=mode,
        config=actor_config(info, **options),
    )
    assert_same(ours, theirs)
    assert_same(gradient(ours, output.log_probs), gradient(theirs, output.log_probs))
    for name, their_name in {
        "clip_fraction": "actor/pg_clipfrac",
        "clip_fraction_lower": "actor/pg_clipfrac_lower",
        "approx_kl": "actor/ppo_kl",
    }.items():
        total, weight = metrics[name]
        assert (total / weight).item() == pytest.approx(their_metrics[their_name], rel=1e-6, abs=1e-9), name
    assert metrics["clip_fraction"][0] > 0


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
