"""Advantages and rewards against verl's own functions, padded there and packed here."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from rl_backend.algorithm import (
    ADVANTAGE_ESTIMATORS,
    gae_advantages,
    groups_with_signal,
    kl_in_reward,
    masked_whiten,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    token_rewards,
)
from rl_backend.contracts import PackedBatch
from tests.support.rl_batches import LENGTHS, pack, pad, random_sequences
from tests.support.verl_reference import assert_same

pytest.importorskip("verl", reason="verl is not installed")

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


@pytest.fixture(scope="module")
def core_algos() -> ModuleType:
    import verl.trainer.ppo.core_algos

    return verl.trainer.ppo.core_algos


def packed(seed: int, dtype: torch.dtype) -> PackedBatch:
    """Six sequences of uneven length with gaps in their masks, one without any selected token."""
    return pack(random_sequences(seed, dtype), {})[1]


def assert_same_at_selected(ours: Tensor, theirs: Tensor, batch: PackedBatch) -> None:
    """Ours is 0 elsewhere; verl leaves what it carried past these positions."""
    mask = pad(batch.token_field("loss_mask"), batch) != 0
    assert (pad(ours, batch)[~mask] == 0).all()
    assert_same(pad(ours, batch)[mask], theirs[mask])


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


@pytest.mark.shows("algorithms: GAE, RLOO, Dr. GRPO, REINFORCE++ and its baseline form equal verl's functions")
@DTYPES
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (0.97, 0.0), (0.0, 1.0)])
def test_gae_equals_verls(core_algos: ModuleType, gamma: float, lam: float, dtype: torch.dtype) -> None:
    batch = packed(21, dtype)
    rewards, values = batch.token_field("token_rewards"), batch.token_field("old_values")
    mask = batch.token_field("loss_mask")
    advantages, returns = gae_advantages(rewards, values, mask, batch.seq_lens, gamma, lam)
    assert advantages.dtype == returns.dtype == dtype
    theirs, their_returns = core_algos.compute_gae_advantage_return(
        pad(rewards, batch), pad(values, batch), pad(mask, batch), gamma, lam
    )
    assert_same_at_selected(returns, their_returns, batch)
    assert_same_at_selected(masked_whiten(advantages, mask), theirs, batch)


def test_values_need_no_shift_as_in_verls_critic(core_algos: ModuleType) -> None:
    from tensordict import TensorDict
    from verl.workers.utils.padding import no_padding_2_padding

    batch = packed(22, torch.float64)
    values, rewards = batch.token_field("old_values") + 0.5, batch.token_field("token_rewards")

    def slices(part: slice | None) -> Tensor:
        parts = batch.split(batch.input_ids)
        cut = [p[:prompt] if part is None else p[prompt:] for p, (prompt, _) in zip(parts, LENGTHS, strict=True)]
        return torch.nested.as_nested_tensor(cut, layout=torch.jagged)

    data = TensorDict({"prompts": slices(None), "responses": slices(slice(None))}, batch_size=[len(LENGTHS)])
    response_values, response_rewards, mask = (
        no_padding_2_padding(field, data) for field in (values, rewards, batch.token_field("loss_mask"))
    )
    _, theirs = core_algos.compute_gae_advantage_return(response_rewards, response_values, mask, 0.9, 0.8)
    _, ours = gae_advantages(rewards, values, batch.token_field("loss_mask"), batch.seq_lens, 0.9, 0.8)
    assert_same(no_padding_2_padding(ours, data) * mask, theirs * mask)
    assert mask.sum() == batch.token_field("loss_mask").sum()


@DTYPES
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_equals_verls(core_algos: ModuleType, gamma: float, dtype: torch.dtype) -> None:
    batch = packed(23, dtype)
    rewards, mask = batch.token_field("token_rewards"), batch.token_field("loss_mask")
    ours = reinforce_plus_plus_advantages(rewards, mask, batch.seq_lens, gamma)
    theirs, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        pad(rewards, batch), pad(mask, batch), config=SimpleNamespace(gamma=gamma)
    )
    assert ours.dtype == dtype
    assert_same_at_selected(ours, theirs, batch)


@DTYPES
def test_reinforce_plus_plus_baseline_equals_verls(core_algos: ModuleType, dtype: torch.dtype) -> None:
    batch = packed(24, dtype)
    mask = batch.token_field("loss_mask")
    rewards = torch.tensor([0.3, -1.2, 2.0, 0.7, 0.1, 1.4], dtype=dtype)
    uids = ["a", "b", "a", "b", "c", "a"]
    ours = reinforce_plus_plus_baseline_advantages(rewards, mask, batch.seq_lens, group_ids=uids)
    placed = torch.zeros_like(pad(mask, batch))
    placed[:, 0] = rewards
    theirs, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(placed, pad(mask, batch), uids)
    assert ours.dtype == dtype
    assert_same_at_selected(ours, theirs, batch)


@DTYPES
@pytest.mark.parametrize("scale", [3.0, 1e-4])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_equals_verls(shift_mean: bool, scale: float, dtype: torch.dtype) -> None:
    from verl.utils.torch_functional import masked_whiten as verl_masked_whiten

    batch = packed(25, dtype)
    values, mask = scale * (batch.token_field("returns") + 2.0), batch.token_field("loss_mask")
    theirs = verl_masked_whiten(pad(values, batch), pad(mask, batch), shift_mean=shift_mean)
    assert_same_at_selected(masked_whiten(values, mask, shift_mean=shift_mean), theirs, batch)


@pytest.mark.parametrize("kl_type", ["k1", "k3"])
def test_kl_in_the_reward_equals_verls(core_algos: ModuleType, kl_type: str) -> None:
    batch = packed(26, torch.float64)
    mask = batch.token_field("loss_mask")
    rewards = token_rewards([1.0, 0.0, -1.0, 0.5, 2.0, 1.0], mask, batch.seq_lens).double()
    old, ref = batch.token_field("old_log_probs"), batch.token_field("ref_log_probs")
    ours = kl_in_reward(rewards, old, ref, mask, kl_coef=0.1, kl_type=kl_type)
    # What apply_kl_penalty of verl.trainer.ppo.ray_trainer does, whose import takes 5 s.
    kl = core_algos.kl_penalty(pad(old, batch), pad(ref, batch), kl_penalty=kl_type) * pad(mask, batch)
    assert_same(pad(ours, batch), pad(rewards, batch) - 0.1 * kl)
    if kl_type == "k1":
        theirs = core_algos.compute_rewards(pad(rewards, batch), pad(old, batch), pad(ref, batch), 0.1)
        assert_same_at_selected(ours, theirs, batch)


def test_the_overlong_penalty_is_verls_up_to_the_longest_response() -> None:
    lengths = torch.arange(1, 101)
    ours = overlong_penalty(lengths, max_response_tokens=100, buffer_tokens=30, penalty=0.8)
    # verl has it inside DAPORewardManager.__call__: min(-exceed / buffer * factor, 0).
    theirs = torch.tensor([min(-(length - 70) / 30 * 0.8, 0) for length in lengths.tolist()])
    assert_same(ours, theirs)


def test_groups_without_signal_are_those_whose_standard_deviation_is_zero() -> None:
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.25, 0.5])
    std = rewards.view(4, 2).numpy().std(axis=1)
    assert groups_with_signal(rewards, group_size=2)[::2].tolist() == (std != 0).tolist()
