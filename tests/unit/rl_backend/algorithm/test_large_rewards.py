"""Rewards that float32 cannot tell apart, from a batch's rewards to the advantages of its sequences, against fractions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

import pytest
import torch
from torch import Tensor

from examples.ppo import PPOConfig, with_gae
from rl_backend import TokenSequence
from rl_backend.algorithm import episode_rewards, episode_sequences, groups_with_signal
from rl_backend.algorithm.sequences import Advantage, with_advantages, with_episode_gae, with_outputs
from tests.support.episodes import episode, segment

GROUPS = [
    [1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3],
    [-3e9, 1.0 - 3e9, 1.0 - 3e9, 5.0 - 3e9],
    [1 + 2.0**-40, 1.0, 1.0, 1.0],
]
TOKENS = 2


def exact(rewards: Sequence[float], advantage: Advantage) -> list[float]:
    """Of each response of one group, all of as many tokens."""
    given, n = [Fraction(each) for each in rewards], len(rewards)
    centered = [each - sum(given) / n for each in given]
    if advantage == "dr_grpo":
        return [float(each) for each in centered]
    if advantage == "rloo":
        return [float(each * n / (n - 1)) for each in centered]
    if advantage == "grpo":
        return [float(each) / (math.sqrt(sum(each**2 for each in centered) / (n - 1)) + 1e-6) for each in centered]
    variance = TOKENS * sum(each**2 for each in centered) / (TOKENS * n - 1)
    return [float(each) / math.sqrt(float(variance) + 1e-8) for each in centered]


def advantages_of(sequences: Sequence[TokenSequence], name: str = "advantages") -> list[float]:
    """One for each sequence, all of whose sampled tokens have the same."""
    found = []
    for each in sequences:
        fields = {**each.sequence_fields, **each.token_fields}
        values: Tensor = fields[name].expand(len(each))[each.token_fields["loss_mask"] != 0]
        assert values.dtype == torch.float32 and len(set(values.tolist())) == 1
        found.append(values[0].item())
    return found


@pytest.mark.shows("algorithms: rewards are float64 up to the advantage, for responses and for episodes")
@pytest.mark.parametrize("rewards", GROUPS, ids=str)
@pytest.mark.parametrize("advantage", get_args(Advantage.__value__))
def test_rewards_that_float32_cannot_tell_apart_have_their_advantages(rewards: list[float], advantage: Advantage) -> None:
    right = pytest.approx(exact(rewards, advantage), rel=1e-6, abs=0)
    sequences = [TokenSequence.from_prompt_and_response([5], [6, 7]) for _ in rewards]
    assert advantages_of(with_advantages(sequences, rewards, advantage, len(rewards))) == right
    played = [episode(segment([("given", [5]), ("sampled", [6, 7])], rewards=[reward])) for reward in rewards]
    sequences = with_advantages(episode_sequences(played), episode_rewards(played), advantage, group_ids=[0] * len(rewards))
    assert advantages_of(sequences) == right


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_rewards_that_float32_cannot_tell_apart_carry_a_signal(rewards: list[float]) -> None:
    assert groups_with_signal(rewards, group_size=len(rewards)).all()
    assert not groups_with_signal([rewards[0]] * len(rewards), group_size=len(rewards)).any()


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_a_critic_that_knows_nothing_yet_leaves_whitened_rewards(rewards: list[float]) -> None:
    right = pytest.approx(exact(rewards, "reinforce_plus_plus"), rel=1e-6, abs=0)
    nothing = {"old_values": [torch.zeros(1 + TOKENS) for _ in rewards]}
    sequences = with_outputs([TokenSequence.from_prompt_and_response([5], [6, 7]) for _ in rewards], nothing)
    estimated, _ = with_gae(sequences, rewards, PPOConfig(model="m", dataset="d", reward="r:f"))
    assert advantages_of(estimated) == right
    assert advantages_of(estimated, "returns") == pytest.approx(rewards, rel=1e-7)
    played = [episode(segment([("given", [5]), ("sampled", [6, 7])], rewards=[reward])) for reward in rewards]
    sequences = with_outputs(episode_sequences(played), nothing)
    estimated = with_episode_gae(sequences, episode_rewards(played), gamma=1.0, lam=1.0)
    assert advantages_of(estimated) == right
    assert advantages_of(estimated, "returns") == pytest.approx(rewards, rel=1e-7)


def test_a_kl_in_the_reward_leaves_the_rewards_their_differences() -> None:
    rewards = GROUPS[0]
    log_probs = {"old_log_probs": torch.full((3,), -1.0), "ref_log_probs": torch.full((3,), -1.0)}
    sequences = [TokenSequence.from_prompt_and_response([5], [6, 7]).with_fields(log_probs) for _ in rewards]
    found = with_advantages(sequences, rewards, "reinforce_plus_plus", 1, kl_coef=0.1)
    assert advantages_of(found) == pytest.approx(exact(rewards, "reinforce_plus_plus"), rel=1e-6, abs=0)


def test_a_turns_reward_and_the_episodes_add_up_exactly() -> None:
    """The last token has what the turns do not: 1e8 + 1 less 1e8, and not what float32 makes of them."""
    played = episode(segment([("given", [5]), ("sampled", [6]), ("given", [8]), ("sampled", [7])], rewards=[1e8, 0.25]))
    other = episode(segment([("given", [5]), ("sampled", [6])], rewards=[0.0]))
    values = {"old_values": [torch.tensor([1e8, 0.0, 0.0, 0.0]), torch.zeros(2)]}
    sequences = with_outputs(episode_sequences([played, other]), values)
    (first, _) = with_episode_gae(sequences, [1e8 + 1.25, 0.0], gamma=1.0, lam=0.0)
    assert first.token_fields["returns"][[0, 2]].tolist() == [1e8, 1.25]
