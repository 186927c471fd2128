"""Responses grouped by their prompt: which belong together, and which groups carry a signal."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_backend.contracts import BatchError, ConfigError


@dataclass(frozen=True, eq=False)
class RewardGroups:
    """How each of N responses stands to its group; (N,) and float64 unless said otherwise.

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


def group_rewards(
    rewards: Tensor | Sequence[float],
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> RewardGroups:
    """Checks rewards and groups, and compares each reward with its group.

    Args:
        rewards: (N,) numbers.
        group_size: responses per prompt, when those of one prompt stand next to each other.
        group_ids: (N,) labels, equal for responses to one prompt, in any order. Exactly one of the two is given.

    Raises:
        BatchError: a reward that is not finite, or groups that do not fit N.
        ConfigError: both or none of ``group_size`` and ``group_ids``.
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


def groups_with_signal(
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> Tensor:
    """(N,) bool: False for every response of a group whose rewards are all equal, which gives no gradient.

    The filter of dynamic sampling: a loop keeps the other groups and samples further prompts in place of these. A response
    alone in its group is kept, because its advantage is its reward.

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.2; verl filters groups by a standard deviation of 0.

    Args:
        rewards, group_size, group_ids: as in :func:`~rl_backend.algorithm.advantages.grpo_advantages`.

    Raises:
        BatchError, ConfigError: as :func:`~rl_backend.algorithm.advantages.grpo_advantages`.
    """
    groups = group_rewards(rewards, group_size, group_ids)
    return (groups.size == 1) | ~groups.equal


def finite_rewards(rewards: Tensor | Sequence[float]) -> Tensor:
    """(N,) float64; raises :class:`BatchError` for another shape or a reward that is not finite."""
    given = torch.as_tensor(rewards)
    if given.dim() != 1:
        raise BatchError(f"rewards has shape {tuple(given.shape)}; expected (N,): one number per response")
    scores = given.to(torch.float64)
    not_finite = torch.nonzero(~torch.isfinite(scores)).flatten().tolist()
    if not_finite:
        raise BatchError(f"rewards[{not_finite[0]}] is {given[not_finite[0]].item()}; every reward must be finite")
    return scores


def result_dtype(rewards: Tensor | Sequence[float]) -> torch.dtype:
    """The dtype of ``rewards``; float32 when they are not floating."""
    given = torch.as_tensor(rewards).dtype
    return given if given.is_floating_point else torch.float32


def _group_indices(scores: Tensor, group_size: int | None, group_ids: Tensor | Sequence[Hashable] | None) -> Tensor:
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
