"""Policy-gradient surrogates: one loss per token, from log-probs and advantages.

They differ in what importance ratio they use and where they clip it. All read the other tensors only where ``loss_mask`` is
not 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_backend.algorithm.aggregation import (
    broadcast_to_tokens,
    check_not_negative,
    sum_by_sequence,
    token_mean_metric,
    zero_masked,
)
from rl_backend.contracts import ConfigError

type MetricPair = tuple[Tensor, Tensor]


def check_clip_options(clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None = None) -> None:
    """Raises :class:`ConfigError` for a negative or infinite clip ratio, or ``clip_ratio_c`` that is not above 1."""
    check_not_negative(clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    if clip_ratio_c is not None and not (math.isfinite(clip_ratio_c) and clip_ratio_c > 1):
        raise ConfigError.of("clip_ratio_c", clip_ratio_c, "must be a finite number above 1; None switches dual clip off")


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, dict[str, MetricPair]]:
    """PPO: ``max(-A r, -A clip(r, 1 - low, 1 + high))`` with ``r = exp(log_probs - old_log_probs)``.

    Where A < 0 the loss is at most ``-A clip_ratio_c`` (dual clip). ``log_probs - old_log_probs`` is limited to
    [-20, 20], beyond which the gradient is 0.

    Sources: PPO, https://arxiv.org/abs/1707.06347, equation 7; two clip ratios, DAPO, https://arxiv.org/abs/2503.14476;
    dual clip, https://arxiv.org/abs/1912.09729, equation 5; as in verl's ``compute_policy_loss_vanilla``.

    Args:
        log_probs: (T,) floating, with a gradient.
        old_log_probs: (T,), of the policy that the ratio refers to.
        advantages: (T,).
        loss_mask: (T,).
        clip_ratio_c: None switches the dual clip off.

    Returns:
        (T,) losses, 0 where ``loss_mask`` is 0, and metrics over the selected tokens: ``clip_fraction`` (the upper bound
        of the objective was active), ``clip_fraction_lower`` (the dual clip was; only with ``clip_ratio_c``),
        ``approx_kl`` (mean of ``old_log_probs - log_probs``, nats).

    Raises:
        ConfigError: a clip ratio.
    """
    check_clip_options(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    log_ratio = zero_masked(log_probs - old_log_probs, loss_mask).clamp(min=-20.0, max=20.0)
    advantages = zero_masked(advantages, loss_mask)
    losses, clipped = _pessimistic(log_ratio.exp(), advantages, clip_ratio_low, clip_ratio_high)
    metrics = {
        "clip_fraction": token_mean_metric(clipped.to(losses.dtype), loss_mask),
        "approx_kl": token_mean_metric(-log_ratio, loss_mask),
    }
    if clip_ratio_c is not None:
        negative = advantages < 0
        bound = -advantages * clip_ratio_c
        metrics["clip_fraction_lower"] = token_mean_metric((negative & (losses > bound)).to(losses.dtype), loss_mask)
        losses = torch.where(negative, torch.minimum(losses, bound), losses)
    return losses, metrics


def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> tuple[Tensor, dict[str, MetricPair]]:
    """GSPO: PPO's loss with one ratio for all tokens of a sequence, the geometric mean of theirs.

    ``s = exp(mean(log_probs - old_log_probs))`` over the selected tokens, at token t in the form
    ``sg(s) * exp(log_probs_t - sg(log_probs_t))`` with ``sg`` the stop-gradient: its value is s, its gradient reaches every
    token with that token's own advantage. ``log s`` is at most 10, beyond which the gradient is 0. The data must hold
    complete sequences, as every loss in this project sees them.

    Sources: GSPO, https://arxiv.org/abs/2507.18071, sections 4.1 and 4.3 (GSPO-token), clip ratios of its experiments;
    verl's ``compute_policy_loss_gspo``.

    Args:
        seq_lens: (B,) int64 on the CPU.
        log_probs, old_log_probs, advantages, loss_mask: as in :func:`clipped_policy_loss`.

    Returns:
        As :func:`clipped_policy_loss`, without ``clip_fraction_lower``.

    Raises:
        ConfigError: a clip ratio.
    """
    check_clip_options(clip_ratio_low, clip_ratio_high)
    log_probs = zero_masked(log_probs, loss_mask)
    log_ratio = (log_probs - zero_masked(old_log_probs, loss_mask)).detach()
    count = sum_by_sequence((loss_mask != 0).to(log_ratio.dtype), seq_lens).clamp(min=1.0)
    log_sequence_ratio = broadcast_to_tokens(sum_by_sequence(log_ratio, seq_lens) / count, seq_lens)
    ratio = (log_sequence_ratio + log_probs - log_probs.detach()).clamp(max=10.0).exp()
    losses, clipped = _pessimistic(ratio, zero_masked(advantages, loss_mask), clip_ratio_low, clip_ratio_high)
    return losses, {
        "clip_fraction": token_mean_metric(clipped.to(losses.dtype), loss_mask),
        "approx_kl": token_mean_metric(-log_ratio, loss_mask),
    }


def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_ratio_low: float = 1.0,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, MetricPair]]:
    """CISPO: ``-sg(clip(r, 1 - low, 1 + high)) A log_probs``; clipping bounds a token's weight but never its gradient to 0.

    ``log_probs - old_log_probs`` is limited to [-20, 20] inside r.

    Sources: CISPO, https://arxiv.org/abs/2506.13585, equations 4 and 5, which sets no lower bound (``clip_ratio_low=1``);
    verl's ``compute_policy_loss_cispo``.

    Args:
        log_probs, old_log_probs, advantages, loss_mask: as in :func:`clipped_policy_loss`.

    Returns:
        As :func:`clipped_policy_loss`, without ``clip_fraction_lower``; ``clip_fraction`` counts ratios beyond either bound.

    Raises:
        ConfigError: a clip ratio.
    """
    check_clip_options(clip_ratio_low, clip_ratio_high)
    log_probs = zero_masked(log_probs, loss_mask)
    log_ratio = (log_probs.detach() - zero_masked(old_log_probs, loss_mask)).clamp(min=-20.0, max=20.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    return -clipped * zero_masked(advantages, loss_mask) * log_probs, {
        "clip_fraction": token_mean_metric((clipped != ratio).to(ratio.dtype), loss_mask),
        "approx_kl": token_mean_metric(-log_ratio, loss_mask),
    }


def _pessimistic(ratio: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Tensor]:
    """The larger of the unclipped and the clipped loss, and (T,) bool: where it is the clipped one."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped
