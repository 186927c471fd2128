"""Advantages from one reward per response, relative to its group or to the batch."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from rl_backend.algorithm.critic import gae_advantages, masked_whiten
from rl_backend.algorithm.loss_aggregation import broadcast_to_tokens, check_packed
from rl_backend.contracts import BatchError, ConfigError

type Rewards = Tensor | Sequence[float]
type GroupIds = Tensor | Sequence[Hashable] | None


@dataclass(frozen=True, eq=False)
class RewardGroups:
    """Each of N responses compared with its group; (N,), float64 unless noted.

    Attributes:
        size: responses in its group.
        centered: the reward less the group's mean, exactly 0 where all rewards of the group are equal; the reward itself
            where a response is alone.
        std: unbiased standard deviation of its group; 1 where a response is alone.
        equal: bool, all rewards of the group are equal.
    """

    size: Tensor
    centered: Tensor
    std: Tensor
    equal: Tensor


def group_rewards(rewards: Rewards, group_size: int | None = None, group_ids: GroupIds = None) -> RewardGroups:
    """Checks rewards and groups, and compares each reward with its group.

    Args, Raises:
        as :func:`grpo_advantages`.
    """
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

    The filter of dynamic sampling: a loop keeps the other groups and samples further prompts in place of these. A response
    alone in its group is kept, because its advantage is its reward.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2; verl filters groups by a standard deviation of 0.

    Args, Raises:
        as :func:`grpo_advantages`.
    """
    groups = group_rewards(rewards, group_size, group_ids)
    return (groups.size == 1) | ~groups.equal


def finite_rewards(rewards: Rewards) -> Tensor:
    """(N,) float64; raises :class:`BatchError` for another shape or a reward that is not finite."""
    # Of a list torch would make float32, in which 1e8 and 1e8 + 1 are the same.
    given = rewards if isinstance(rewards, Tensor) else torch.as_tensor(rewards, dtype=torch.float64)
    if given.dim() != 1:
        raise BatchError(f"rewards has shape {tuple(given.shape)}; expected (N,): one number per response")
    scores = given.to(torch.float64)
    not_finite = torch.nonzero(~torch.isfinite(scores)).flatten().tolist()
    if not_finite:
        raise BatchError(f"rewards[{not_finite[0]}] is {given[not_finite[0]].item()}; every reward must be finite")
    return scores


def result_dtype(rewards: Rewards) -> torch.dtype:
    """Of advantages: the dtype of a floating tensor of rewards; float32 of any others."""
    return rewards.dtype if isinstance(rewards, Tensor) and rewards.is_floating_point() else torch.float32


def _group_indices(scores: Tensor, group_size: int | None, group_ids: GroupIds) -> Tensor:
    """(N,) int64 numbers from 0, on the device of ``scores``."""
    responses = scores.shape[0]
    if (group_size is None) == (group_ids is None):
        raise ConfigError("give exactly one of group_size and group_ids", group_size=group_size)
    if group_size is not None:
        if group_size < 1:
            raise ConfigError.of("group_size", group_size, "must be at least 1")
        if responses % group_size:
            raise BatchError(f"{responses} rewards are not a multiple of group_size={group_size}")
        return torch.arange(responses, device=scores.device) // group_size
    assert group_ids is not None
    labels = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
    if len(labels) != responses:
        raise BatchError(f"{len(labels)} group_ids for {responses} rewards")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.int64).to(scores.device)


class AdvantageEstimator(Protocol):
    """One advantage per response, (N,), from rewards (N,) and their groups."""

    def __call__(self, rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor: ...


def grpo_advantages(
    rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None, eps: float = 1e-6
) -> Tensor:
    """One advantage per response: ``(r - mean(group)) / (std(group) + eps)``.

    The standard deviation is the unbiased one. A group of a single response has mean 0 and standard deviation 1, as in
    verl's ``compute_grpo_outcome_advantage``: its advantage is its reward. The arithmetic is done in float64, and equal
    rewards give exactly no advantage.

    Source: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Args:
        rewards: (N,) numbers.
        group_size: responses per prompt, when those of one prompt stand next to each other.
        group_ids: (N,) labels, equal for responses to one prompt, in any order. Exactly one of the two is given.
        eps: added to the standard deviation; above 0.

    Returns:
        (N,) in the dtype and on the device of ``rewards``; float32 when they are no floating tensor.

    Raises:
        BatchError: a reward that is not finite, or groups that do not fit N.
        ConfigError: both or none of ``group_size`` and ``group_ids``, or ``eps``.
    """
    if not eps > 0:
        raise ConfigError.of("eps", eps, "must be above 0; dr_grpo_advantages does not divide")
    groups = group_rewards(rewards, group_size, group_ids)
    return (groups.centered / (groups.std + eps)).to(result_dtype(rewards))


def dr_grpo_advantages(rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor:
    """One advantage per response: ``r - mean(group)``; the reward itself where a response is alone in its group.

    Sources: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2; verl's ``compute_grpo_outcome_advantage`` with
    ``norm_adv_by_std_in_grpo=False``. The paper's loss goes with it: ``loss_agg_mode="seq-mean-token-sum-norm"``.

    Args, Returns, Raises:
        as :func:`grpo_advantages`.
    """
    return group_rewards(rewards, group_size, group_ids).centered.to(result_dtype(rewards))


def rloo_advantages(rewards: Rewards, *, group_size: int | None = None, group_ids: GroupIds = None) -> Tensor:
    """One advantage per response: its reward less the mean reward of the *other* responses in its group.

    That is ``(r - mean(group)) * n / (n - 1)`` for n responses; the reward itself where a response is alone in its group,
    as in verl's ``compute_rloo_outcome_advantage``.

    Source: RLOO, https://arxiv.org/abs/2402.14740.

    Args, Returns, Raises:
        as :func:`grpo_advantages`.
    """
    groups = group_rewards(rewards, group_size, group_ids)
    scale = groups.size / (groups.size - 1).clamp(min=1)
    return (groups.centered * scale).to(result_dtype(rewards))


ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages}
)
"""By name, the estimators that give one number per response. Those that give one per token take other arguments:
:mod:`rl_backend.algorithm.critic` and :mod:`rl_backend.algorithm.advantages`."""


def reinforce_plus_plus_advantages(token_rewards: Tensor, loss_mask: Tensor, seq_lens: Tensor, gamma: float = 1.0) -> Tensor:
    """The discounted sum of the rewards from each token on, whitened over the batch: (T,).

    With a KL penalty in ``token_rewards`` (:func:`~rl_backend.algorithm.rewards.kl_in_reward`, estimator ``k1``) this is
    the paper's; its advantages differ from token to token. The batch must be whole, see
    :func:`~rl_backend.algorithm.critic.masked_whiten`.

    Sources: REINFORCE++, https://arxiv.org/abs/2501.03262; verl's ``compute_reinforce_plus_plus_outcome_advantage``.

    Args, Returns, Raises:
        as :func:`~rl_backend.algorithm.critic.gae_advantages`; BatchError with fewer than two selected tokens.
    """
    # Without a critic and with lambda 1, an advantage is the return.
    returns, _ = gae_advantages(token_rewards, torch.zeros_like(token_rewards), loss_mask, seq_lens, gamma, 1.0)
    return masked_whiten(returns, loss_mask)


def reinforce_plus_plus_baseline_advantages(
    rewards: Rewards, loss_mask: Tensor, seq_lens: Tensor, *, group_size: int | None = None, group_ids: GroupIds = None
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
        (T,) on the device of ``loss_mask``, 0 where that is 0; in the dtype of ``rewards``, float32 when they are no
        floating tensor.

    Raises:
        BatchError: a reward that is not finite, shapes or groups that do not fit, or fewer than two selected tokens.
        ConfigError: both or none of ``group_size`` and ``group_ids``.
    """
    check_packed(seq_lens, loss_mask=loss_mask)
    centered = group_rewards(rewards, group_size, group_ids).centered.to(loss_mask.device)
    return masked_whiten(broadcast_to_tokens(centered, seq_lens), loss_mask).to(result_dtype(rewards))
