"""Options of losses and estimates of the examples reach what computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.episodes import EpisodesConfig
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig, with_gae
from rl_backend.contracts import TokenSequence

PATHS = {"model": "m", "dataset": "d", "run_dir": "x"}
LOSS = {
    "name": "gspo",
    "clip_ratio_low": 0.11,
    "clip_ratio_high": 0.33,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 77.0,
}
OF_LOSS = {name: value for name, value in LOSS.items() if name != "name"}


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, EpisodesConfig])
@pytest.mark.parametrize(
    ("importance", "weights"),
    [
        ({"importance": "truncate", "importance_cap": 3.0}, {"tis_cap": 3.0}),
        ({"importance": "mask", "importance_cap": 4.0}, {"mis_bounds": (0.25, 4.0)}),
        ({"max_staleness": 1}, {"tis_cap": 2.0}),
        ({"max_staleness": 1, "importance": "off"}, {}),
    ],
    ids=str,
)
def test_every_option_of_a_policy_loss_reaches_it(kind: Any, importance: dict[str, Any], weights: dict[str, Any]) -> None:
    given = {"environment": "m:make"} if kind is EpisodesConfig else {"reward": "r"}
    of_kl = {"kl_place": "loss"} if kind is PPOConfig else {}
    config = kind(**PATHS, **given, loss=LOSS, kl_coef=0.3, entropy_coef=0.02, temperature=0.8, **of_kl, **importance)
    made = (
        config.actor_loss()
        if kind is PPOConfig
        else config.policy_loss()
        if kind is EpisodesConfig
        else config.loss_function()
    )
    assert made.target == "rl_backend.algorithm:gspo_loss"
    assert made.keywords == {**OF_LOSS, "kl_coef": 0.3, "entropy_coef": 0.02, "on_policy": True, **weights}
    assert config.meta() == {"temperature": 0.8, "calculate_entropy": True}


@pytest.mark.parametrize(
    ("kind", "given", "on_policy"),
    [
        (GRPOConfig, {}, True),
        (GRPOConfig, {"kl_coef": 0.1, "max_staleness": 1}, True),
        (GRPOConfig, {"updates_per_step": 2}, False),
        (GRPOConfig, {"kl_coef": 0.1, "kl_place": "reward", "advantage": "reinforce_plus_plus"}, False),
        (GRPOConfig, {"router_replay": "R2"}, False),
        (GRPOConfig, {"router_replay": "R3"}, True),
        (GRPOConfig, {"lora.rank": 8, "lora.dropout": 0.1}, False),
        (PPOConfig, {}, True),
        (PPOConfig, {"epochs": 2}, False),
        (PPOConfig, {"lora.rank": 8, "lora.dropout": 0.1}, False),
        (PPOConfig, {"kl_coef": 0.1}, False),
        (PPOConfig, {"kl_coef": 0.1, "kl_place": "loss"}, True),
        (PPOConfig, {"updates_per_step": 4}, False),
    ],
    ids=str,
)
def test_the_only_update_of_a_step_has_old_log_probs_itself_where_nothing_needs_them_before(
    kind: Any, given: dict[str, Any], on_policy: bool
) -> None:
    config = kind(**PATHS, reward="r", **given)
    made = config.actor_loss() if kind is PPOConfig else config.loss_function()
    assert made.keywords["on_policy"] is config.on_policy is on_policy
    # The entropy is that of the update's pass then, for metrics alone.
    assert config.meta()["calculate_entropy"] is on_policy


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_the_longest_response_divides_where_no_factor_is_given(kind: Any) -> None:
    config = kind(**PATHS, reward="r", max_response_tokens=321, loss={"loss_agg_mode": "seq-mean-token-sum-norm"})
    made = config.actor_loss() if kind is PPOConfig else config.loss_function()
    assert made.keywords["loss_scale_factor"] == 321.0
    played = EpisodesConfig(
        **PATHS, environment="m:make", max_episode_tokens=999, loss={"loss_agg_mode": "seq-mean-token-sum-norm"}
    )
    assert played.policy_loss().keywords["loss_scale_factor"] == 999.0


def test_options_of_a_critic_reach_its_loss_its_optimizer_and_its_estimates() -> None:
    options = {"critic_lr": 3e-4, "cliprange_value": 0.2, "steps": 10, "updates_per_step": 2, "epochs": 3, "lr": 1e-5}
    config = PPOConfig(
        **PATHS, reward="r", gamma=0.9, lam=0.7, kl_coef=0.5, kl_place="reward", critic_warmup_steps=4, **options
    )
    assert config.critic_loss().keywords == {"cliprange_value": 0.2}
    assert config.actor_loss().keywords["kl_coef"] == 0.0
    optimizer = config.critic_optimizer()
    assert (optimizer.lr, optimizer.total_training_steps, config.optimizer_steps) == (3e-4, 60, 36)
    values, old, reference = [0.3, -0.2, 0.5], [-1.0, -0.5, -2.0], [-1.5, -0.4, -1.0]
    fields = {"old_values": values, "old_log_probs": old, "ref_log_probs": reference}
    sequences = [
        TokenSequence.from_prompt_and_response([1, 2], [3, 4, 5], response_fields=fields),
        TokenSequence.from_prompt_and_response([1], [2], response_fields={name: own[:1] for name, own in fields.items()}),
    ]
    found, metrics = with_gae(sequences, [2.0, -1.0], config)
    estimates = []
    for reward, length in ((2.0, 3), (-1.0, 1)):
        rewards = [-0.5 * (old[place] - reference[place]) + reward * (place == length - 1) for place in range(length)]
        following, own = 0.0, list[float]()
        for place in reversed(range(length)):
            after = values[place + 1] if place + 1 < length else 0.0
            following = rewards[place] + 0.9 * after - values[place] + 0.9 * 0.7 * following
            own.insert(0, following)
        estimates.append(own)
    flat = torch.tensor([each for own in estimates for each in own], dtype=torch.float64)
    whitened = (flat - flat.mean()) / flat.std()
    advantages = torch.cat([each.token_fields["advantages"][each.token_fields["loss_mask"] != 0] for each in found])
    returns = torch.cat([each.token_fields["returns"][each.token_fields["loss_mask"] != 0] for each in found])
    torch.testing.assert_close(advantages.double(), whitened, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        returns.double(), flat + torch.tensor([*values, values[0]], dtype=torch.float64), rtol=1e-5, atol=1e-6
    )
    assert metrics.keys() == {"explained_variance", "kl"}
