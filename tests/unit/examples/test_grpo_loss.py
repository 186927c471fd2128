"""The KL to a reference in examples/grpo.py: where it goes, and that it is trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.grpo import GRPOConfig
from rl_backend.contracts import ModelOutput
from rl_backend.data.packing import pack
from tests.support.sft_batches import random_token_sequences


def config(**changes: Any) -> GRPOConfig:
    paths = {"model": "m", "dataset": "d", "reward": "r", "run_dir": "x"}
    return GRPOConfig(**{**paths, "steps": 1, "max_prompt_tokens": 4, "max_response_tokens": 4, **changes})


def gradient(made: GRPOConfig) -> torch.Tensor:
    """Of the configuration's loss, for a policy that has left its reference and has no advantage."""
    (sequence,) = random_token_sequences((6,), 128, 0)
    log_probs = torch.full((6,), -2.0)
    fields = {"old_log_probs": log_probs, "ref_log_probs": log_probs - 1.0, "advantages": torch.zeros(6)}
    meta = {"batch_num_tokens": 5.0, "global_batch_size": 1, "dp_size": 1}
    policy = log_probs.clone().requires_grad_()
    loss, _ = made.loss_function()(ModelOutput(log_probs=policy), pack([sequence.with_fields(fields)], meta), None)
    loss.backward()
    assert policy.grad is not None
    return policy.grad


def test_a_kl_in_the_loss_pulls_the_policy_to_its_reference() -> None:
    weak, strong = (gradient(config(kl_coef=coefficient)) for coefficient in (0.1, 0.2))
    assert bool((weak[:-1] > 0).all())
    torch.testing.assert_close(strong, 2 * weak)
    assert config(kl_coef=0.1).kl_in_reward == 0.0


def test_without_a_coefficient_or_with_the_kl_in_the_reward_the_loss_has_none() -> None:
    assert float(gradient(config()).abs().max()) == 0.0
    of_reward = config(kl_coef=0.1, kl_place="reward", advantage="reinforce_plus_plus")
    assert float(gradient(of_reward).abs().max()) == 0.0
    assert of_reward.kl_in_reward == pytest.approx(0.1)
