"""Rewards of tokens and the penalties that are taken off them, at their bounds and with options away from their defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_backend.algorithm import (
    explained_variance,
    kl_in_reward,
    masked_importance_weights,
    overlong_penalty,
    sequences_without_veto,
    token_rewards,
    truncated_importance_weights,
)
from rl_backend.algorithm.critic import gae_advantages, masked_whiten, value_loss
from rl_backend.algorithm.policy import KL_TYPES, kl_penalty
from rl_backend.algorithm.surrogates import check_clip_options, check_importance_options
from rl_backend.contracts import BatchError, ConfigError, ModelOutput, PackedBatch


def test_rewards_stand_at_the_last_selected_token_whatever_selects_it() -> None:
    for mask in (torch.tensor([1.0, -0.5, 0.0, 0.0, 0.0, 2.0, 0.25]), torch.tensor([1, 1, 0, 0, 0, 1, 1]).bool()):
        placed = token_rewards(torch.tensor([3, 5, 7]), mask, torch.tensor([3, 2, 2]))
        assert placed.tolist() == [0, 3, 0, 0, 0, 0, 7] and placed.dtype == torch.float64
    # Of float32, 1e8 and 1e8 + 1 would be the same.
    assert token_rewards([1e8 + 1], torch.ones(1), torch.tensor([1])).item() == 1e8 + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_rewards(torch.ones(1, 2), torch.ones(2), torch.tensor([1, 1])), r"rewards has shape \(1, 2\)"),
        (lambda: token_rewards([1.0, float("-inf")], torch.ones(2), torch.tensor([1, 1])), r"rewards\[1\] is -inf"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        call()


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3", "abs", "k3+"])
def test_the_kl_of_the_chosen_kind_is_taken_off_without_a_gradient(kl_type: str) -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    log_probs = torch.tensor([-1.0, -2.0, float("nan"), -0.25], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([-1.5, -1.0, -9.0, -0.5], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0, 2.0])
    found = kl_in_reward(rewards, log_probs, reference, mask, kl_coef=0.3, kl_type=kl_type)
    difference = torch.tensor([0.5, -1.0, 0.0, 0.25], dtype=torch.float64)
    kinds = {"k1": difference, "k2": difference**2 / 2, "abs": difference.abs()}
    kl = kinds.get(kl_type, (-difference).exp() - 1 + difference)
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, 0.0, 4.0], dtype=torch.float64) - 0.3 * kl)
    assert not found.requires_grad
    assert torch.equal(kl_in_reward(rewards, log_probs, reference, mask, kl_coef=0.0), rewards * (mask != 0))


def test_names_of_the_kl_are_the_same_estimates() -> None:
    ones, others = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -0.5])
    for one, other in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k1+", "kl+"), ("k2+", "mse+")):
        assert torch.equal(kl_penalty(ones, others, one), kl_penalty(ones, others, other))
    assert len(KL_TYPES) == 14
    # exp(20) - 20 - 1 and exp(-20) + 20 - 1, each within 10.
    assert kl_penalty(torch.tensor([-30.0, 30.0, 5.0]), torch.zeros(3), "k3").tolist() == pytest.approx([10, 10, 4.00673795])
    with pytest.raises(ConfigError, match=r"kl_type='k1\+\+': must be one of k1, kl, k2"):
        kl_penalty(ones, others, "k1++")


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (7, 0.0), (8, -0.5), (9, -1.0), (10, -1.5), (11, -1.5)])
def test_a_long_response_loses_inside_of_the_buffer(length: int, expected: float) -> None:
    for lengths in ([length, 0], torch.tensor([length, 0])):
        found = overlong_penalty(lengths, max_response_tokens=10, buffer_tokens=3, penalty=1.5)
        assert found.tolist() == [pytest.approx(expected), 0.0] and found.dtype == torch.float64
    assert overlong_penalty([4, 10], max_response_tokens=10, buffer_tokens=10, penalty=2.0).tolist() == [-0.8, -2.0]
    assert overlong_penalty([10], max_response_tokens=10, buffer_tokens=1, penalty=0.0).tolist() == [0.0]


def test_whitening_keeps_the_mean_where_asked_and_the_type_of_values() -> None:
    values, mask = torch.tensor([1.0, 100.0, 3.0, 8.0]), torch.tensor([1, 0, 2, 1])
    deviation = torch.tensor([1.0, 3.0, 8.0]).double().std().item()
    white = masked_whiten(values, mask)
    assert white.tolist() == pytest.approx([(each - 4) / deviation if each else 0 for each in (1, 0, 3, 8)])
    kept = masked_whiten(values, mask, shift_mean=False)
    assert kept.tolist() == pytest.approx([(each - 4) / deviation + 4 if each else 0 for each in (1, 0, 3, 8)])
    assert white.dtype == torch.float32 and masked_whiten(values.double(), mask).dtype == torch.float64
    with pytest.raises(BatchError, match=r"values\[2\] is nan"):
        masked_whiten(torch.tensor([1.0, float("nan"), float("nan")]), torch.tensor([1, 0, 1]))


def test_gae_of_uneven_sequences_goes_on_to_final_values_where_there_are_actions() -> None:
    rewards = torch.tensor([1.0, 2.0, 9.0, 9.0, 3.0])
    values = torch.tensor([0.5, 0.25, 9.0, 9.0, 1.0], dtype=torch.float64)
    mask, lengths = torch.tensor([1, 1, 0, 0, 1]), torch.tensor([3, 1, 1])
    final = torch.tensor([4.0, 5.0, -2.0])
    advantages, returns = gae_advantages(rewards, values, mask, lengths, 0.5, 0.8, final_values=final)
    second = 2.0 + 0.5 * 4.0 - 0.25
    first = 1.0 + 0.5 * 0.25 - 0.5 + 0.4 * second
    third = 3.0 + 0.5 * -2.0 - 1.0
    assert advantages.tolist() == pytest.approx([first, second, 0, 0, third])
    assert returns.tolist() == pytest.approx([first + 0.5, second + 0.25, 0, 0, third + 1.0])
    assert advantages.dtype == returns.dtype == torch.float64
    ended, _ = gae_advantages(rewards, values, mask, lengths, 0.5, 0.8)
    assert ended.tolist() == gae_advantages(rewards, values, mask, lengths, 0.5, 0.8, final_values=0 * final)[0].tolist()
    for bad in (torch.tensor([1.0, float("nan"), 1.0]), torch.ones(2), torch.ones(3, 1)):
        with pytest.raises(BatchError, match="final_values must be 3 finite numbers, one for each sequence"):
            gae_advantages(rewards, values, mask, lengths, final_values=bad)
    for gamma, lam in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        gae_advantages(rewards, values, mask, lengths, gamma, lam)


def test_options_of_a_critics_loss_are_refused_before_its_batch_is_looked_at() -> None:
    nothing = PackedBatch(torch.arange(2), torch.tensor([2]))
    for options, message in (
        ({"loss_agg_mode": "mean"}, "loss_agg_mode='mean'"),
        ({"loss_scale_factor": 2.0}, "loss_scale_factor=2.0"),
        ({"cliprange_value": -0.5}, "cliprange_value=-0.5: must be a finite number above 0; None switches it off"),
        ({"cliprange_value": float("inf")}, "cliprange_value=inf"),
    ):
        with pytest.raises(ConfigError, match=message):
            value_loss(ModelOutput(), nothing, **options)


def test_a_critic_without_tokens_explains_nothing_and_masked_values_are_not_read() -> None:
    nan = float("nan")
    assert math.isnan(explained_variance(torch.ones(2), torch.tensor([1.0, 2.0]), torch.zeros(2)))
    found = explained_variance(torch.tensor([1.0, nan, 5.0]), torch.tensor([2.0, nan, 4.0]), torch.tensor([1, 0, 3]))
    assert found == pytest.approx(1 - 1.0 / 1.0), "errors of 1 and -1 have the variance of 2 and 4"


@pytest.mark.parametrize(
    "options",
    [
        {"tis_cap": 1e-3},
        {"mis_bounds": (0.0, 1.0)},
        {"mis_bounds": [1.0, 1.0], "importance_level": "sequence"},
        {"tis_cap": 2.0, "importance_level": "sequence", "importance_veto": 0.999},
        {"importance_veto": 1e-9},
    ],
)
def test_importance_options_at_their_bounds_are_taken(options: dict[str, Any]) -> None:
    given = {"tis_cap": None, "mis_bounds": None, "importance_level": "token", "importance_veto": None, **options}
    check_importance_options(**given)
    check_clip_options(0.0, 0.0, 1.0001)


def test_weights_at_their_bounds_are_kept_and_a_veto_is_of_any_token() -> None:
    old = torch.tensor([0.5, 2.0, 0.49, 2.01, 1.0], dtype=torch.float64).log()
    mask, lengths = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([2, 1, 2])
    zeros = torch.zeros(5, dtype=torch.float64)
    kept = masked_importance_weights(old, zeros, mask, lengths, bounds=(old[0].exp().item(), old[1].exp().item()))
    assert kept.tolist() == pytest.approx([0.5, 2.0, 0, 0, 0])
    assert truncated_importance_weights(old, zeros, mask, lengths, cap=1.5).tolist() == pytest.approx(
        [0.5, 1.5, 0.49, 1.5, 0]
    )
    whole = truncated_importance_weights(old, zeros, mask, lengths, cap=1.5, level="sequence")
    assert whole.tolist() == pytest.approx([1.0, 1.0, 0.49, 1.5, 0])
    assert sequences_without_veto(old, zeros, mask, lengths, veto=0.495).tolist() == [True, True, False, True, True]
    assert sequences_without_veto(old.flip(0), zeros, mask.flip(0), lengths.flip(0), veto=0.495).tolist() == [
        True, True, False, True, True,
    ]  # fmt: skip
    assert sequences_without_veto(old, zeros, mask, lengths, veto=0.6).tolist() == [False, False, False, True, True]
