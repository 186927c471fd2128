"""The clipped policy-gradient surrogate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_backend.algorithm.masking import token_mean_metric, zero_masked
from rl_backend.contracts import ConfigError

type MetricPair = tuple[Tensor, Tensor]


def check_clip_options(clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None) -> None:
    """Raises :class:`ConfigError` for a negative or infinite clip ratio, or ``clip_ratio_c`` that is not above 1."""
    for name, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError.of(name, value, "must be a finite number, 0 or above")
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
    importance_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, MetricPair]]:
    """One loss per token: ``max(-A r, -A clip(r, 1 - low, 1 + high))`` with ``r = exp(log_probs - old_log_probs)``.

    Where A < 0 the loss is at most ``-A clip_ratio_c`` (dual clip). ``log_probs - old_log_probs`` is limited to
    [-20, 20], beyond which the gradient is 0.

    Sources: PPO, https://arxiv.org/abs/1707.06347, equation 7; two clip ratios, DAPO, https://arxiv.org/abs/2503.14476;
    dual clip, https://arxiv.org/abs/1912.09729, equation 5; as in verl's ``compute_policy_loss_vanilla``.

    Args:
        log_probs: (T,) floating, with a gradient.
        old_log_probs: (T,), of the policy that the ratio refers to.
        advantages: (T,).
        loss_mask: (T,); the other tensors are not read where it is 0.
        clip_ratio_c: None switches the dual clip off.
        importance_weights: (T,), multiplied onto the losses after clipping.

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
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    losses = torch.maximum(unclipped, clipped)
    metrics = {
        "clip_fraction": token_mean_metric((clipped > unclipped).to(losses.dtype), loss_mask),
        "approx_kl": token_mean_metric(-log_ratio, loss_mask),
    }
    if clip_ratio_c is not None:
        negative = advantages < 0
        bound = -advantages * clip_ratio_c
        metrics["clip_fraction_lower"] = token_mean_metric((negative & (losses > bound)).to(losses.dtype), loss_mask)
        losses = torch.where(negative, torch.minimum(losses, bound), losses)
    if importance_weights is not None:
        losses = losses * zero_masked(importance_weights, loss_mask)
    return losses, metrics
