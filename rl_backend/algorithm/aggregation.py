"""From one loss per token to the loss of a micro-batch, over denominators of the whole batch.

The sum over any split into micro-batches, averaged over data-parallel ranks, is the same loss with the same gradient.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor

from rl_backend.algorithm.masking import masked_sum, zero_masked
from rl_backend.algorithm.sequences import sum_by_sequence
from rl_backend.contracts import BatchError, ConfigError, PackedBatch

type LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode.__value__)


def check_loss_agg_mode(mode: str, loss_scale_factor: float | None) -> None:
    """Raises :class:`ConfigError` for an unknown mode, or a scale factor that is missing, unused or not positive."""
    if mode not in LOSS_AGG_MODES:
        raise ConfigError.of("loss_agg_mode", mode, f"must be one of {', '.join(LOSS_AGG_MODES)}")
    if mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            raise ConfigError.of(
                "loss_scale_factor", None, f"loss_agg_mode={mode!r} needs it, for example the longest response allowed"
            )
        if not (math.isfinite(loss_scale_factor) and loss_scale_factor > 0):
            raise ConfigError.of("loss_scale_factor", loss_scale_factor, "must be a finite number above 0")
    elif loss_scale_factor is not None:
        raise ConfigError.of(
            "loss_scale_factor", loss_scale_factor, f"loss_agg_mode={mode!r} does not use it; leave it None"
        )


def aggregation_terms(
    token_losses: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    mode: str = "token-mean",
    *,
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Numerator and local share of the denominator: both 0-d, only the first with a gradient.

    Added over all micro-batches and ranks and divided, they are the mean over the batch: detached, they are a metric.

    ``seq-mean-token-sum-norm`` is Dr. GRPO's, https://arxiv.org/abs/2503.20783; ``token-mean`` is DAPO's,
    https://arxiv.org/abs/2503.14476; ``seq-mean-token-mean`` is GRPO's, https://arxiv.org/abs/2402.03300.

    Args:
        token_losses: (T,) floating; not read where ``loss_mask`` is 0.
        loss_mask: (T,) bool, integer or floating weights.
        seq_lens: (B,) int64 on the CPU.
        mode: tokens, or sequences with the sum or mean of their tokens. A sequence without any selected token counts,
            with loss 0.
        loss_scale_factor: what ``seq-mean-token-sum-norm`` divides by: a constant, for example the longest response.

    Raises:
        ConfigError: the mode or the scale factor.
    """
    check_loss_agg_mode(mode, loss_scale_factor)
    weights = loss_mask.to(token_losses.dtype)
    if mode == "token-mean":
        return masked_sum(token_losses, weights), weights.sum()
    sequences = token_losses.new_tensor(float(seq_lens.shape[0]))
    sums = sum_by_sequence(zero_masked(token_losses, weights) * weights, seq_lens)
    if mode == "seq-mean-token-mean":
        count = sum_by_sequence(weights, seq_lens)
        sums = sums / count.where(count > 0, 1.0)
    total = sums.sum()
    return (total / loss_scale_factor if loss_scale_factor is not None else total), sequences


def aggregate_loss(
    token_losses: Tensor,
    loss_mask: Tensor,
    data: PackedBatch,
    mode: str = "token-mean",
    *,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """This micro-batch's part of the loss, 0-d and differentiable: ``sum / denominator * dp_size``.

    Reads ``dp_size`` and ``batch_num_tokens`` (``token-mean``) or ``global_batch_size`` (the other modes) from
    ``data.meta``; counts of this micro-batch never stand in for them. The factor ``dp_size`` undoes the average that
    data parallelism takes of gradients.

    Args:
        token_losses, loss_mask, mode, loss_scale_factor: as in :func:`aggregation_terms`.

    Raises:
        BatchError: a denominator is missing from ``data.meta`` or is not positive.
        ConfigError: the mode or the scale factor.
    """
    total, _ = aggregation_terms(token_losses, loss_mask, data.seq_lens, mode, loss_scale_factor=loss_scale_factor)
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    return total / _positive_number(data, name) * _positive_number(data, "dp_size")


def _positive_number(data: PackedBatch, name: str) -> float:
    if data.meta.get(name) is None:
        raise BatchError(f"meta[{name!r}] is missing; the batch has {sorted(data.meta)}", name=name)
    number = float(data.meta[name])
    if not (math.isfinite(number) and number > 0):
        raise BatchError(f"meta[{name!r}] is {number}; it must be above 0: a batch without response tokens has no loss")
    return number
