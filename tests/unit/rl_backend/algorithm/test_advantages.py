"""Group advantages."""

from __future__ import annotations

import pytest
import torch

from rl_backend.algorithm import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    broadcast_to_tokens,
    dr_grpo_advantages,
    groups_with_signal,
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


ESTIMATORS = pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.values(), ids=ADVANTAGE_ESTIMATORS)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6, -7.7])
@ESTIMATORS
def test_equal_rewards_give_no_advantage(estimator: AdvantageEstimator, reward: float) -> None:
    assert estimator(torch.full((7,), reward, dtype=torch.float64), group_size=7).tolist() == [0.0] * 7


@ESTIMATORS
def test_advantages_of_a_group_add_up_to_nothing(estimator: AdvantageEstimator) -> None:
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert estimator(rewards, group_size=4).view(3, 4).sum(1).abs().max() < 1e-12


def test_a_group_of_equal_rewards_carries_no_signal_and_a_single_response_does() -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.0, 1.0, 0.5]
    ids = ["same", "same", "same", "mixed", "mixed", "mixed", "alone"]
    kept = groups_with_signal(rewards, group_ids=ids)
    assert kept.tolist() == [False, False, False, True, True, True, True]
    assert groups_with_signal(rewards[:6], group_size=3)[::3].tolist() == [False, True]
    assert torch.equal(grpo_advantages(rewards, group_ids=ids) != 0, kept)


@ESTIMATORS
def test_a_response_alone_in_its_group_keeps_its_reward(estimator: AdvantageEstimator) -> None:
    assert estimator([2.0, 5.0], group_size=1).tolist() == pytest.approx([2.0, 5.0], rel=1e-5)


@ESTIMATORS
def test_whole_number_rewards_give_float32_and_float64_stays(estimator: AdvantageEstimator) -> None:
    assert estimator(torch.tensor([0, 1]), group_size=2).dtype == torch.float32
    assert estimator(torch.tensor([0.0, 1.0], dtype=torch.float64), group_size=2).dtype == torch.float64


@ESTIMATORS
def test_no_rewards_give_no_advantages(estimator: AdvantageEstimator) -> None:
    assert estimator([], group_size=4).shape == (0,)
    assert groups_with_signal([], group_size=4).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([1.0, float("nan")], {"group_size": 2}, r"rewards\[1\] is nan"),
        ([1.0, float("inf")], {"group_size": 2}, r"rewards\[1\] is inf"),
        ([1.0, 2.0, 3.0], {"group_size": 2}, "3 rewards do not fit group_size=2"),
        ([1.0, 2.0], {"group_ids": ["a"]}, "2 rewards do not fit 1 group_ids"),
        ([[1.0, 2.0]], {"group_size": 2}, r"shape \(1, 2\)"),
        ([1.0, 2.0], {"group_size": 0}, "2 rewards do not fit group_size=0"),
        ([1.0, 2.0], {"group_size": -1}, "2 rewards do not fit group_size=-1"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(rewards: list, options: dict, message: str) -> None:
    for function in (*ADVANTAGE_ESTIMATORS.values(), groups_with_signal):
        with pytest.raises(BatchError, match=message):
            function(rewards, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 2, "group_ids": [0, 0]},
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
    with pytest.raises(RuntimeError, match="repeats must have the same size"):
        broadcast_to_tokens(torch.zeros(3), torch.tensor([1, 3]))
