"""Rewards of tokens, and advantages from one reward per response, relative to its group or to the batch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from rl_backend.algorithm.critic import gae_advantages, masked_whiten
from rl_backend.algorithm.loss_aggregation import broadcast_to_tokens, check_not_negative, check_packed, zero_masked
from rl_backend.algorithm.policy import check_kl_type, kl_penalty
from rl_backend.contracts import BatchError, ConfigError

type Rewards = Tensor | Sequence[float]
type GroupIds = Tensor | Sequence[Hashable] | None


@dataclass(frozen=True, eq=False)
class RewardGroups:
    """Each of N responses compared with its group: (N,) float64, and bool for ``equal``, whether all its rewards are.

    ``centered`` is the reward less the group's mean, exactly 0 where all are equal; ``std`` is unbiased. Of a response
    that is alone they are the reward itself and 1.
    """

    size: Tensor
    centered: Tensor
    std: Tensor
    equal: Tensor


def group_rewards(rewards: Rewards, group_size: int | None = None, group_ids: GroupIds = None) -> RewardGroups:
    scores = finite_rewards(rewards)
    groups = _group_indices(scores, group_size, group_ids)
    count = torch.bincount(groups).to(torch.float64)
    zeros = torch.zeros_like(count)
    alone = (count == 1)[groups]
    highest = zeros.scatter_reduce(0, groups, scores, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, groups, scores, "amin", include_self=False)
    equal = (highest == lowest)[groups]

    mean = zeros.index_add(0, groups, scores) / count
    # A mean of equal numbers is off by rounding, which a division by a standard deviation near 0 would magnify.
    centered = torch.where(equal, 0.0, scores - mean[groups])
    std = (zeros.index_add(0, groups, centered.square()) / (count - 1).clamp(min=1)).sqrt()
    return RewardGroups(count[groups], torch.where(alone, scores, centered), torch.where(alone, 1.0, std[groups]), equal)


def groups_with_signal(rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor:
    """(N,) bool: False for every response of a group whose rewards are all equal, which gives no gradient.

    Source: dynamic sampling, DAPO, https://arxiv.org/abs/2503.14476, section 3.2. Arguments as of :func:`grpo_advantages`.
    """
    groups = group_rewards(rewards, group_size, group_ids)
    # The advantage of a response that is alone is its reward.
    return (groups.size == 1) | ~groups.equal


def finite_rewards(rewards: Rewards) -> Tensor:
    """(N,) float64; raises :class:`BatchError` for another shape or a reward that is not finite."""
    # Of a list torch would make float32, in which 1e8 and 1e8 + 1 are the same.
    given = rewards if isinstance(rewards, Tensor) else torch.as_tensor(rewards, dtype=torch.float64)
    scores = given.to(torch.float64)
    not_finite = torch.nonzero(~torch.isfinite(scores)).flatten().tolist()
    if given.dim() != 1 or not_finite:
        first = f", and rewards[{not_finite[0]}] is {given.flatten()[not_finite[0]].item()}" if not_finite else ""
        raise BatchError(f"rewards has shape {tuple(given.shape)}{first}; expected (N,): one finite number per response")
    return scores


def result_dtype(rewards: Rewards) -> torch.dtype:
    return rewards.dtype if isinstance(rewards, Tensor) and rewards.is_floating_point() else torch.float32


def _group_indices(scores: Tensor, group_size: int | None, group_ids: GroupIds) -> Tensor:
    responses = scores.shape[0]
    if (group_size is None) == (group_ids is None):
        raise ConfigError("give exactly one of group_size and group_ids", group_size=group_size)
    labels: list[Hashable] = []
    if group_ids is not None:
        labels = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    elif group_size is not None and group_size > 0:
        labels = [index // group_size for index in range(responses)]
    if len(labels) != responses or (group_size and responses % group_size):
        given = f"group_size={group_size}" if group_ids is None else f"{len(labels)} group_ids"
        raise BatchError(f"{responses} rewards do not fit {given}; give whole groups, or one label per reward")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.int64).to(scores.device)


class AdvantageEstimator(Protocol):
    """One advantage per response, (N,), from rewards (N,) and their groups."""

    def __call__(self, rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor: ...


def grpo_advantages(
    rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None, eps: float = 1e-6
) -> Tensor:
    """One advantage per response: ``(r - mean(group)) / (std(group) + eps)``, with the unbiased standard deviation.

    A group of one has mean 0 and standard deviation 1, as in verl's ``compute_grpo_outcome_advantage``. Equal rewards give
    exactly no advantage. Source: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Args:
        rewards: (N,).
        group_size: responses per prompt, when those of one prompt stand next to each other.
        group_ids: in its place (N,) labels, equal for responses to one prompt, in any order.

    Returns:
        (N,) in the dtype and on the device of ``rewards``; float32 when they are no floating tensor.

    Raises:
        BatchError: a reward that is not finite, or groups that do not fit N.
    """
    if not eps > 0:
        raise ConfigError.of("eps", eps, "must be above 0; dr_grpo_advantages does not divide")
    groups = group_rewards(rewards, group_size, group_ids)
    return (groups.centered / (groups.std + eps)).to(result_dtype(rewards))


def dr_grpo_advantages(rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor:
    """One advantage per response: ``r - mean(group)``; the reward itself where a response is alone in its group.

    Sources: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2, with ``loss_agg_mode="seq-mean-token-sum-norm"``;
    verl's ``norm_adv_by_std_in_grpo=False``. Arguments, result and errors as of :func:`grpo_advantages`.
    """
    return group_rewards(rewards, group_size, group_ids).centered.to(result_dtype(rewards))


def rloo_advantages(rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor:
    """One advantage per response: its reward less the mean reward of the *other* responses in its group.

    The reward itself where a response is alone, as in verl. Source: RLOO, https://arxiv.org/abs/2402.14740. Arguments,
    result and errors as of :func:`grpo_advantages`.
    """
    groups = group_rewards(rewards, group_size, group_ids)
    # r - mean of the others = (r - mean of all) * n / (n - 1).
    scale = groups.size / (groups.size - 1).clamp(min=1)
    return (groups.centered * scale).to(result_dtype(rewards))


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}
)
"""The estimators that give one number per response."""


def reinforce_plus_plus_advantages(token_rewards: Tensor, loss_mask: Tensor, seq_lens: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each token on, whitened over the batch, which must be whole: (T,).

    With :func:`~rl_backend.algorithm.advantages.kl_in_reward` of ``k1`` this is the paper's. Sources: REINFORCE++,
    https://arxiv.org/abs/2501.03262; verl's ``compute_reinforce_plus_plus_outcome_advantage``. Arguments and errors as of
    :func:`~rl_backend.algorithm.critic.gae_advantages`.
    """
    # Without a critic and with lambda 1, an advantage is the return.
    returns, _ = gae_advantages(token_rewards, torch.zeros_like(token_rewards), loss_mask, seq_lens, gamma, 1.0)
    return masked_whiten(returns, loss_mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Rewards, loss_mask: Tensor, seq_lens: Tensor, *, group_size: int | None = None, group_ids: GroupIds = None
) -> Tensor:
    """``reward - mean(group)`` at every response token, whitened over the tokens of the batch, which must be whole: (T,).

    The reward of a response alone in its group is not centred, as in verl. Sources: REINFORCE++-baseline,
    https://arxiv.org/abs/2501.03262; verl's ``compute_reinforce_plus_plus_baseline_outcome_advantage``.

    ``rewards`` and ``seq_lens`` are (B,), ``loss_mask`` is (T,), and so is the result on its device, 0 where it is 0; the
    rest as of :func:`grpo_advantages`.
    """
    check_packed(seq_lens, loss_mask=loss_mask)
    centered = group_rewards(rewards, group_size, group_ids).centered.to(loss_mask.device)
    return masked_whiten(broadcast_to_tokens(centered, seq_lens), loss_mask).to(result_dtype(rewards))


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
