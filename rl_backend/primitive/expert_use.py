"""Load of the experts, and the router bias that balances it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertUse(NamedTuple):
    """Choices of the tokens of a micro-batch, without padding and without a gradient.

    Attributes:
        counts: (E,) int64, how often each expert was chosen.
        num_tokens: 0-d int64.
    """

    counts: Tensor
    num_tokens: Tensor


def expert_use(
    experts: Tensor,
    num_experts: int,
    padding: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], object] | None = None,
) -> ExpertUse:
    """Counts (T, top_k) choices.

    Args:
        padding: (T,) bool, tokens that do not count.
        sum_over_ranks: adds a tensor up, in place, over the ranks that have the other tokens of the micro-batch.
    """
    num_tokens = experts.new_full((1,), experts.shape[0])
    if padding is not None:
        num_tokens = num_tokens - padding.sum()
        experts = experts.masked_fill(padding[:, None], num_experts)
    use = torch.cat((count_sorted(experts.flatten().sort().values, num_experts), num_tokens))
    if sum_over_ranks is not None:
        sum_over_ranks(use)
    return ExpertUse(use[:-1], use[-1])


def count_sorted(ordered: Tensor, num_experts: int) -> Tensor:
    """How often each expert stands in (N,) ascending numbers; (E,) int64. Unlike bincount it never waits for a device."""
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=ordered.device), right=True)
    return ends.diff(prepend=ends.new_zeros(1))


def expert_bias_step(counts: Tensor, rate: float) -> Tensor:
    """What one step of loss-free balancing adds to a bias: ``rate * sign(mean count - count_e)``; (E,) float32.

    Wang et al., arXiv 2408.15664, algorithm 1.

    Args:
        counts: (E,) int64, tokens of the whole batch, of all micro-batches and ranks, that chose each expert.
        rate: the paper takes 0.001 for sigmoid scores.
    """
    # Whole numbers: a mean is rounded, and then no expert may have exactly as many as it.
    below_mean = torch.sign(counts.sum() - counts.numel() * counts)
    return rate * below_mean.to(torch.float32)
