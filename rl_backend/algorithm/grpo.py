"""The GRPO loss, composed of the parts in this package."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_backend.algorithm.aggregation import aggregate_loss, aggregation_terms, check_loss_agg_mode
from rl_backend.algorithm.importance import check_importance_options, truncated_importance_weights
from rl_backend.algorithm.inputs import differentiable_entropy, required_log_probs, token_advantages, token_vector
from rl_backend.algorithm.kl import check_kl_type, kl_penalty
from rl_backend.algorithm.masking import token_mean_metric, zero_masked
from rl_backend.algorithm.policy_loss import check_clip_options, clipped_policy_loss
from rl_backend.contracts import ConfigError, MetricValue, ModelOutput, PackedBatch


def grpo_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    tis_cap: float | None = None,
    tis_level: str = "token",
    entropy_coef: float = 0.0,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Clipped policy loss + ``kl_coef`` * KL to a reference - ``entropy_coef`` * entropy; a
    :class:`~rl_backend.contracts.LossFn`.

    All three terms are aggregated in the same way. Source: GRPO, https://arxiv.org/abs/2402.03300, equation 3; composed as
    verl's ``ppo_loss`` does. ``dp_group`` is not needed, since the denominators are counted over all ranks.

    Reads token fields, each (T,) and aligned as :mod:`rl_backend.contracts.batch` defines:
        ``loss_mask``; ``old_log_probs``; ``advantages`` (or a sequence field of that name, (B,)); ``ref_log_probs`` when
        ``kl_coef`` > 0; ``rollout_log_probs`` when ``tis_cap`` is given.

    Reads from ``data.meta``: ``dp_size`` and ``batch_num_tokens`` or ``global_batch_size``, see
    :func:`~rl_backend.algorithm.aggregation.aggregate_loss`.

    Args:
        clip_ratio_low, clip_ratio_high, clip_ratio_c: see :func:`~rl_backend.algorithm.policy_loss.clipped_policy_loss`.
        loss_agg_mode, loss_scale_factor: see :func:`~rl_backend.algorithm.aggregation.aggregation_terms`.
        kl_coef, kl_type: see :func:`~rl_backend.algorithm.kl.kl_penalty`.
        tis_cap, tis_level: see :func:`~rl_backend.algorithm.importance.truncated_importance_weights`; None: no weights.
        entropy_coef: weight of the entropy bonus, nats; needs ``meta["calculate_entropy"]``.

    Returns:
        The loss, and metrics as (sum, weight) pairs: ``policy_loss`` (the mean that is optimised), ``clip_fraction``,
        ``clip_fraction_lower``, ``approx_kl``; ``kl`` with ``kl_coef``; ``tis_weight`` with ``tis_cap``; ``entropy`` when
        the model gives it; ``log_prob_gap``, the mean of ``|old_log_probs - rollout_log_probs|`` in nats, when the batch
        has both.

    Raises:
        ConfigError: an option that cannot work.
        BatchError: a field, output or denominator that is missing or has another shape.
    """
    check_clip_options(clip_ratio_low, clip_ratio_high, clip_ratio_c)
    check_loss_agg_mode(loss_agg_mode, loss_scale_factor)
    check_kl_type(kl_type)
    if tis_cap is not None:
        check_importance_options(tis_cap, tis_level)
    if not (math.isfinite(kl_coef) and kl_coef >= 0):
        raise ConfigError.of("kl_coef", kl_coef, "must be a finite number, 0 or above")
    if not math.isfinite(entropy_coef):
        raise ConfigError.of("entropy_coef", entropy_coef, "must be a finite number")

    log_probs = required_log_probs(model_output)
    loss_mask = token_vector(data, "loss_mask")
    old_log_probs = token_vector(data, "old_log_probs")

    def aggregate(token_losses: Tensor) -> Tensor:
        return aggregate_loss(token_losses, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor)

    metrics: dict[str, MetricValue] = {}
    weights = None
    if tis_cap is not None or "rollout_log_probs" in data.token_fields:
        rollout_log_probs = token_vector(data, "rollout_log_probs")
        metrics["log_prob_gap"] = token_mean_metric((old_log_probs - rollout_log_probs).abs(), loss_mask)
        if tis_cap is not None:
            weights = truncated_importance_weights(
                old_log_probs, rollout_log_probs, loss_mask, data.seq_lens, cap=tis_cap, level=tis_level
            )
            metrics["tis_weight"] = token_mean_metric(weights, loss_mask)

    token_losses, policy_metrics = clipped_policy_loss(
        log_probs,
        old_log_probs,
        token_advantages(data),
        loss_mask,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        importance_weights=weights,
    )
    metrics.update(policy_metrics)
    loss = aggregate(token_losses)
    metrics["policy_loss"] = aggregation_terms(
        token_losses.detach(), loss_mask, data.seq_lens, loss_agg_mode, loss_scale_factor=loss_scale_factor
    )

    if kl_coef > 0:
        ref_log_probs = token_vector(data, "ref_log_probs")
        kl = kl_penalty(zero_masked(log_probs, loss_mask), zero_masked(ref_log_probs, loss_mask), kl_type)
        metrics["kl"] = token_mean_metric(kl, loss_mask)
        loss = loss + kl_coef * aggregate(kl)

    if entropy_coef != 0:
        loss = loss - entropy_coef * aggregate(differentiable_entropy(model_output))
    if model_output.entropy is not None:
        metrics["entropy"] = token_mean_metric(model_output.entropy, loss_mask)
    return loss, metrics
