"""Rewards of tokens, with KL and length penalties."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backend.algorithm.advantages import Rewards, finite_rewards
from rl_backend.algorithm.loss_aggregation import check_not_negative, check_packed, zero_masked
from rl_backend.algorithm.policy import check_kl_type, kl_penalty
from rl_backend.contracts import ConfigError


def token_rewards(rewards: Rewards, loss_mask: Tensor, seq_lens: Tensor) -> Tensor:
    """(T,) float64: each sequence's reward at the last token that ``loss_mask`` selects, 0 elsewhere.

    Raises :class:`BatchError` for a reward that is not finite, or shapes that do not fit.
    """
    check_packed(seq_lens, loss_mask=loss_mask)
    # In float64: advantages are small differences of rewards.
    scores = finite_rewards(rewards).to(loss_mask.device)
    placed = torch.zeros(loss_mask.shape[0], dtype=scores.dtype, device=loss_mask.device)
    lengths = seq_lens.tolist()
    for reward, row, selected in zip(scores, placed.split(lengths), (loss_mask != 0).split(lengths), strict=True):
        # A sequence without a selected token has no action to reward.
        if selected.any():
            row[selected.nonzero()[-1]] = reward
    return placed


def kl_in_reward(
    rewards: Tensor, log_probs: Tensor, ref_log_probs: Tensor, loss_mask: Tensor, *, kl_coef: float, kl_type: str = "k1"
) -> Tensor:
    """(T,): ``rewards - kl_coef * KL`` at the selected tokens, 0 elsewhere; without gradient. All tensors are (T,).

    The alternative to a KL term in the loss; for estimators that look at later rewards: GAE and REINFORCE++. Source: RLHF,
    https://arxiv.org/abs/2203.02155, equation 2; verl's ``apply_kl_penalty``.
    ``log_probs`` are those of the policy that sampled.
    """
    check_not_negative(kl_coef=kl_coef)
    check_kl_type(kl_type)
    kl = kl_penalty(zero_masked(log_probs, loss_mask), zero_masked(ref_log_probs, loss_mask), kl_type)
    return zero_masked(rewards - kl_coef * kl, loss_mask).detach()


def overlong_penalty(
    response_lengths: Tensor | Sequence[int], *, max_response_tokens: int, buffer_tokens: int, penalty: float = 1.0
) -> Tensor:
    """What a long response adds to its reward: float64, from 0 down to ``-penalty``.

    0 up to ``max_response_tokens - buffer_tokens``, then falling linearly to ``-penalty`` at ``max_response_tokens``, and
    that beyond. Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13; verl's ``DAPORewardManager``.
    """
    if not 1 <= buffer_tokens <= max_response_tokens:
        raise ConfigError.of(
            "buffer_tokens", buffer_tokens, f"must be within [1, max_response_tokens={max_response_tokens}]"
        )
    check_not_negative(penalty=penalty)
    excess = torch.as_tensor(response_lengths).to(torch.float64) - (max_response_tokens - buffer_tokens)
    return -penalty * (excess / buffer_tokens).clamp(min=0.0, max=1.0)
