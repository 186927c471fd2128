"""Supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_backend.algorithm.aggregation import aggregate_loss
from rl_backend.algorithm.inputs import required_log_probs
from rl_backend.algorithm.masking import token_mean_metric
from rl_backend.contracts import MetricValue, ModelOutput, PackedBatch


def sft_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Negative log-likelihood of the tokens that ``loss_mask`` selects; a :class:`~rl_backend.contracts.LossFn`.

    ``token-mean`` is verl's ``sft_loss``. Reads the token field ``loss_mask`` and the denominators of
    :func:`~rl_backend.algorithm.aggregation.aggregate_loss` from ``data.meta``. ``dp_group`` is not needed, since these
    are counted over all ranks.

    Metrics: ``nll``, the mean over the selected tokens, nats.

    Raises:
        BatchError: a missing field, output or denominator.
        ConfigError: ``loss_agg_mode`` or ``loss_scale_factor``.
    """
    log_probs = required_log_probs(model_output)
    loss_mask = data.token_field("loss_mask")
    loss = aggregate_loss(-log_probs, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    return loss, {"nll": token_mean_metric(-log_probs, loss_mask)}
