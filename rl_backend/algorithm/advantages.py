"""Advantages relative to a group of responses to one prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from rl_backend.contracts import BatchError, ConfigError


def grpo_advantages(
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
    normalize_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """One advantage per response: ``(r - mean(group)) / (std(group) + eps)``.

    The standard deviation is the unbiased one. A group of a single response has mean 0 and standard deviation 1, as in
    verl's ``compute_grpo_outcome_advantage``: its advantage is its reward. The arithmetic is done in float64, so that
    equal rewards give exactly no advantage.

    Sources: GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2; without the division, Dr. GRPO,
    https://arxiv.org/abs/2503.20783.

    Args:
        rewards: (N,) numbers.
        group_size: responses per prompt, when those of one prompt stand next to each other.
        group_ids: (N,) labels, equal for responses to one prompt, in any order. Exactly one of the two is given.
        normalize_by_std: False leaves out the division by ``std + eps``.
        eps: added to the standard deviation, so that equal rewards are not divided by 0; positive with
            ``normalize_by_std``.

    Returns:
        (N,) in the dtype and on the device of ``rewards``; float32 when they are not floating.

    Raises:
        BatchError: a reward that is not finite, or groups that do not fit N.
        ConfigError: both or none of ``group_size`` and ``group_ids``, or an ``eps`` that is negative, or 0 with
            ``normalize_by_std``.
    """
    if not (eps > 0 if normalize_by_std else eps >= 0):
        raise ConfigError.of("eps", eps, "must be positive with normalize_by_std=True, and not negative without")
    given = torch.as_tensor(rewards)
    if given.dim() != 1:
        raise BatchError(f"rewards has shape {tuple(given.shape)}; expected (N,): one number per response")
    scores = given.to(torch.float64)
    not_finite = torch.nonzero(~torch.isfinite(scores)).flatten().tolist()
    if not_finite:
        raise BatchError(f"rewards[{not_finite[0]}] is {given[not_finite[0]].item()}; every reward must be finite")

    groups = _group_indices(scores, group_size, group_ids)
    count = torch.bincount(groups)
    sums = torch.zeros(count.shape[0], dtype=torch.float64, device=scores.device)
    mean = sums.index_add(0, groups, scores) / count
    centered = scores - mean[groups]
    std = (sums.index_add(0, groups, centered.square()) / (count - 1).clamp(min=1)).sqrt()

    alone = (count == 1)[groups]
    advantages = torch.where(alone, scores, centered)
    if normalize_by_std:
        advantages = advantages / (torch.where(alone, 1.0, std[groups]) + eps)
    return advantages.to(given.dtype if given.dtype.is_floating_point else torch.float32)


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
    labels = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids or ())
    if len(labels) != responses:
        raise BatchError(f"{len(labels)} group_ids for {responses} rewards")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels], dtype=torch.int64).to(scores.device)
