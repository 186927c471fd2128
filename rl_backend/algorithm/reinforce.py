"""REINFORCE++: advantages per token, normalised over the whole batch instead of over a prompt's responses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rl_backend.algorithm.gae import gae_advantages
from rl_backend.algorithm.groups import group_rewards, result_dtype
from rl_backend.algorithm.sequences import broadcast_to_tokens, check_packed
from rl_backend.algorithm.whitening import masked_whiten


def reinforce_plus_plus_advantages(token_rewards: Tensor, loss_mask: Tensor, seq_lens: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each token on, whitened over the batch: (T,).

    With a KL penalty in ``token_rewards`` (:func:`~rl_backend.algorithm.rewards.kl_in_reward`, estimator ``k1``) this is
    the paper's; its advantages differ from token to token. The batch must be whole, see
    :func:`~rl_backend.algorithm.whitening.masked_whiten`.

    Sources: REINFORCE++, https://arxiv.org/abs/2501.03262; verl's ``compute_reinforce_plus_plus_outcome_advantage``.

    Args, Returns, Raises:
        as :func:`~rl_backend.algorithm.gae.gae_advantages`; BatchError with fewer than two selected tokens.
    """
    # Without a critic and with lambda 1, an advantage is the return.
    returns, _ = gae_advantages(token_rewards, torch.zeros_like(token_rewards), loss_mask, seq_lens, gamma, 1.0)
    return masked_whiten(returns, loss_mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor | Sequence[float],
    loss_mask: Tensor,
    seq_lens: Tensor,
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> Tensor:
    """``reward - mean(group)`` at every response token, whitened over the tokens of the batch: (T,).

    All selected tokens of a response have the same advantage, but its scale depends on every response's length, because
    the whitening counts tokens. The reward of a response alone in its group is not centred, as in verl.

    Sources: REINFORCE++-baseline, https://arxiv.org/abs/2501.03262; verl's
    ``compute_reinforce_plus_plus_baseline_outcome_advantage``.

    Args:
        rewards: (B,) numbers, one per response, in the order of ``seq_lens``.
        loss_mask: (T,); selects where it is not 0.
        seq_lens: (B,) int64 on the CPU.
        group_size, group_ids: as in :func:`~rl_backend.algorithm.advantages.grpo_advantages`.

    Returns:
        (T,) on the device of ``loss_mask``, 0 where that is 0; in the dtype of ``rewards``, float32 when they are not
        floating.

    Raises:
        BatchError: a reward that is not finite, shapes or groups that do not fit, or fewer than two selected tokens.
        ConfigError: both or none of ``group_size`` and ``group_ids``.
    """
    check_packed(seq_lens, loss_mask=loss_mask)
    centered = group_rewards(rewards, group_size, group_ids).centered.to(loss_mask.device)
    return masked_whiten(broadcast_to_tokens(centered, seq_lens), loss_mask).to(result_dtype(rewards))
