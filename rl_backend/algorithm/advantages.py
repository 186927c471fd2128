"""Advantages from one reward per response, relative to the other responses to its prompt."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from rl_backend.algorithm.groups import group_rewards, result_dtype
from rl_backend.contracts import ConfigError


class AdvantageEstimator(Protocol):
    """One advantage per response, (N,), from rewards (N,) and their groups."""

    def __call__(
        self,
        rewards: Tensor | Sequence[float],
        *,
        group_size: int | None = None,
        group_ids: Tensor | Sequence[Hashable] | None = None,
    ) -> Tensor: ...


def grpo_advantages(
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
    eps: float = 1e-6,
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
        (N,) in the dtype and on the device of ``rewards``; float32 when they are not floating.

    Raises:
        BatchError: a reward that is not finite, or groups that do not fit N.
        ConfigError: both or none of ``group_size`` and ``group_ids``, or ``eps``.
    """
    if not eps > 0:
        raise ConfigError.of("eps", eps, "must be above 0; dr_grpo_advantages does not divide")
    groups = group_rewards(rewards, group_size, group_ids)
    return (groups.centered / (groups.std + eps)).to(result_dtype(rewards))


def dr_grpo_advantages(
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> Tensor:
    """One advantage per response: ``r - mean(group)``; the reward itself where a response is alone in its group.

    Sources: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2; verl's ``compute_grpo_outcome_advantage`` with
    ``norm_adv_by_std_in_grpo=False``. The paper's loss goes with it: ``loss_agg_mode="seq-mean-token-sum-norm"``.

    Args, Returns, Raises:
        as :func:`grpo_advantages`.
    """
    return group_rewards(rewards, group_size, group_ids).centered.to(result_dtype(rewards))


def rloo_advantages(
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[Hashable] | None = None,
) -> Tensor:
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
:mod:`rl_backend.algorithm.gae` and :mod:`rl_backend.algorithm.reinforce`."""
