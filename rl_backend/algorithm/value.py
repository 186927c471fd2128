"""The loss of a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm.aggregation import aggregate_loss, aggregation_terms, check_loss_agg_mode
from rl_backend.algorithm.inputs import required_values, token_vector
from rl_backend.algorithm.masking import token_mean_metric, zero_masked
from rl_backend.contracts import ConfigError, MetricValue, ModelOutput, PackedBatch


def value_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    cliprange_value: float | None = 0.5,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`` per token; a :class:`~rl_backend.contracts.LossFn`.

    Sources: PPO's code, https://arxiv.org/abs/2005.12729, section 3; verl's ``compute_value_loss``. ``dp_group`` is not
    needed, since the denominators are counted over all ranks.

    Reads ``model_output.values`` and the token fields ``loss_mask``, ``returns`` and, with ``cliprange_value``,
    ``old_values``, each (T,). Entry t of all of them is about the choice of token t+1, see :mod:`rl_backend.algorithm.gae`.
    Reads the denominators of :func:`~rl_backend.algorithm.aggregation.aggregate_loss` from ``data.meta``.

    Args:
        cliprange_value: how far a value may move from ``old_values`` before its gradient is 0; None: no clip.
        loss_agg_mode, loss_scale_factor: see :func:`~rl_backend.algorithm.aggregation.aggregation_terms`.

    Returns:
        The loss, and metrics as (sum, weight) pairs: ``value_loss`` (the mean that is optimised), ``value_mean``,
        ``return_mean``; ``value_clip_fraction`` with ``cliprange_value``.

    Raises:
        ConfigError: an option that cannot work.
        BatchError: a field, output or denominator that is missing or has another shape.
    """
    if cliprange_value is not None and not (math.isfinite(cliprange_value) and cliprange_value > 0):
        raise ConfigError.of("cliprange_value", cliprange_value, "must be a finite number above 0; None switches it off")
    check_loss_agg_mode(loss_agg_mode, loss_scale_factor)

    loss_mask = token_vector(data, "loss_mask")
    values = zero_masked(required_values(model_output), loss_mask)
    returns = zero_masked(token_vector(data, "returns"), loss_mask)
    squares = (values - returns).square()
    metrics: dict[str, MetricValue] = {
        "value_mean": token_mean_metric(values, loss_mask),
        "return_mean": token_mean_metric(returns, loss_mask),
    }
    if cliprange_value is not None:
        old_values = zero_masked(token_vector(data, "old_values"), loss_mask)
        clipped = torch.clamp(values, min=old_values - cliprange_value, max=old_values + cliprange_value)
        clipped_squares = (clipped - returns).square()
        active = (clipped_squares > squares).to(squares.dtype)
        metrics["value_clip_fraction"] = token_mean_metric(active, loss_mask)
        squares = torch.maximum(squares, clipped_squares)
    losses = 0.5 * squares
    metrics["value_loss"] = aggregation_terms(
        losses.detach(), loss_mask, data.seq_lens, loss_agg_mode, loss_scale_factor=loss_scale_factor
    )
    return aggregate_loss(losses, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor), metrics
