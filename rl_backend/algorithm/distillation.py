"""Distillation from the top-k of a teacher."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm.loss_aggregation import aggregate_loss, required_output, token_mean_metric, token_vector
from rl_backend.contracts import TARGET_IDS, BatchError, ConfigError, MetricValue, ModelOutput, PackedBatch

KL_DIRECTIONS = ("forward", "reverse")


def top_k_kl(log_probs: Tensor, teacher_log_probs: Tensor, chosen: Tensor, direction: str = "forward") -> Tensor:
    """(T,): KL between teacher q and student p over K tokens and one bucket with all the others; nats, in float64.

    ``forward`` is KL(q || p), ``reverse`` KL(p || q), whose gradient goes through all the K log-probs and the bucket.

    Args:
        log_probs: (T, K), of the student, with a gradient.
        teacher_log_probs: (T, K), of the same, different tokens.
        chosen: (T, K) bool, which of the K there are; the others are not read.

    Raises:
        ConfigError: an unknown direction.
    """
    if direction not in KL_DIRECTIONS:
        raise ConfigError.of("direction", direction, f"must be one of {', '.join(KL_DIRECTIONS)}")
    student, teacher = (
        _with_rest(each.to(torch.float64), chosen) for each in (log_probs, teacher_log_probs.to(log_probs.device))
    )
    first, second = (teacher, student) if direction == "forward" else (student, teacher)
    terms = first.exp() * (first - second)
    return (terms[:, :-1] * chosen).sum(1) + terms[:, -1]


def _with_rest(log_probs: Tensor, chosen: Tensor) -> Tensor:
    """(T, K + 1): the last is the log-probability of all other tokens."""
    log_probs = torch.where(chosen, log_probs, 0.0)
    rest = 1.0 - (log_probs.exp() * chosen).sum(1, keepdim=True)
    # What float32 log-probs cannot tell from 0 has no gradient.
    return torch.cat([log_probs, rest.clamp(min=1e-7).log()], dim=1)


def distillation_loss(
    model_output: ModelOutput,
    data: PackedBatch,
    dp_group: Any = None,
    *,
    direction: str = "forward",
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """:func:`top_k_kl` to a teacher, of the tokens that ``loss_mask`` selects; a :class:`~rl_backend.contracts.LossFn`.

    Reads the token fields ``target_ids`` and ``teacher_log_probs``, (T, K), the tokens that the teacher holds for likeliest
    after each; ``loss_mask``, (T,); and what :func:`~rl_backend.algorithm.loss_aggregation.aggregate_loss` reads.

    Metrics: ``distillation_kl``, the mean over the selected tokens, nats.

    Raises:
        BatchError: a field, output or denominator that is missing or has another shape.
        ConfigError: an option.
    """
    log_probs, chosen = required_output(model_output, "log_probs"), data.token_field(TARGET_IDS) != -100
    teacher, loss_mask = data.token_field("teacher_log_probs"), token_vector(data, "loss_mask")
    if log_probs.dim() != 2 or teacher.shape != log_probs.shape:
        raise BatchError(
            f"teacher_log_probs has shape {tuple(teacher.shape)} and log_probs {tuple(log_probs.shape)}; each is (T, K)",
            name="teacher_log_probs",
        )
    kl = top_k_kl(log_probs, teacher, chosen, direction).to(log_probs.dtype)
    loss = aggregate_loss(kl, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor)
    return loss, {"distillation_kl": token_mean_metric(kl, loss_mask)}
