"""Group advantages."""

from __future__ import annotations

import pytest
import torch

from rl_backend.algorithm import (
    broadcast_to_tokens,
    dr_grpo_advantages,
    grpo_advantages,
    rloo_advantages,
)
from rl_backend.contracts import BatchError, ConfigError


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    advantages = grpo_advantages([1.0, 3.0, 0.0, 0.0], group_size=2)
    torch.testing.assert_close(advantages, torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0, 0.0]), rtol=1e-5, atol=0.0)


def test_dr_grpo_only_takes_off_the_mean() -> None:
    assert dr_grpo_advantages([1.0, 3.0], group_size=2).tolist() == [-1.0, 1.0]


def test_rloo_takes_off_the_mean_of_the_others() -> None:
    assert rloo_advantages([1.0, 2.0, 6.0, 5.0, 5.0, 5.0], group_size=3).tolist() == [-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]


def test_group_ids_may_be_any_labels_in_any_order() -> None:
    rewards = torch.tensor([1.0, 5.0, 2.0, 9.0])
    by_label = grpo_advantages(rewards, group_ids=["x", "y", "x", "y"])
    by_number = grpo_advantages(rewards, group_ids=torch.tensor([7, -2, 7, -2]))
    by_place = grpo_advantages(rewards[[0, 2, 1, 3]], group_size=2)[[0, 2, 1, 3]]
    assert torch.equal(by_label, by_number) and torch.equal(by_label, by_place)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6, -7.7])
def test_equal_rewards_give_no_advantage(reward: float) -> None:
    assert grpo_advantages([reward] * 7, group_size=7).abs().max() < 1e-9


def test_a_response_alone_in_its_group_keeps_its_reward() -> None:
    assert grpo_advantages([2.0, 5.0], group_size=1, eps=1e-12).tolist() == [2.0, 5.0]


def test_whole_number_rewards_give_float32_and_float64_stays() -> None:
    assert grpo_advantages(torch.tensor([0, 1]), group_size=2).dtype == torch.float32
    assert grpo_advantages(torch.tensor([0.0, 1.0], dtype=torch.float64), group_size=2).dtype == torch.float64


def test_no_rewards_give_no_advantages() -> None:
    assert grpo_advantages([], group_size=4).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([1.0, float("nan")], {"group_size": 2}, r"rewards\[1\] is nan"),
        ([1.0, float("inf")], {"group_size": 2}, r"rewards\[1\] is inf"),
        ([1.0, 2.0, 3.0], {"group_size": 2}, "3 rewards are not a multiple of group_size=2"),
        ([1.0, 2.0], {"group_ids": ["a"]}, "1 group_ids for 2 rewards"),
        ([[1.0, 2.0]], {"group_size": 2}, r"shape \(1, 2\)"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(rewards: list, options: dict, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        grpo_advantages(rewards, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 2, "group_ids": [0, 0]},
        {"group_size": 0},
        {"group_size": 2, "eps": -1.0},
        {"group_size": 2, "eps": 0.0},
        {"group_size": 2, "eps": float("nan")},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        grpo_advantages([1.0, 2.0], **options)


def test_broadcasting_repeats_each_sequences_value_over_its_tokens() -> None:
    assert broadcast_to_tokens(torch.tensor([5.0, 7.0]), torch.tensor([1, 3])).tolist() == [5.0, 7.0, 7.0, 7.0]
    with pytest.raises(BatchError, match="each of the 2 sequences"):
        broadcast_to_tokens(torch.zeros(3), torch.tensor([1, 3]))
