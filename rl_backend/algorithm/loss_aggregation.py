"""Packed tokens: what losses read, reductions by mask and sequence, and the loss of a micro-batch.

Losses per token become that of a micro-batch over denominators of the whole batch.

The sum over any split into micro-batches, averaged over data-parallel ranks, is the same loss with the same gradient.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, ModelOutput, PackedBatch


def zero_masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``values`` with 0 where ``loss_mask`` is 0.

    Apply it to the inputs of an expression: a NaN that is masked only in the result still reaches the gradient, as 0 * NaN.

    Args:
        values: (T,) floating.
        loss_mask: (T,) bool, integer or floating.
    """
    return torch.where(loss_mask != 0, values, 0.0)


def masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    """0-d: sum of ``values * loss_mask``, where values at masked positions are never read."""
    return (zero_masked(values, loss_mask) * loss_mask).sum()


def token_mean_metric(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``values`` over the selected tokens as a metric: (sum, weight), both 0-d and detached."""
    return masked_sum(values.detach(), loss_mask), loss_mask.sum().to(values.dtype)


def sum_by_sequence(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(T,) -> (B,): the sum over each sequence's tokens; differentiable.

    One sum per sequence instead of a scatter, because atomic additions on a GPU differ from run to run.

    Args:
        values: (T,).
        seq_lens: (B,) int64 on the CPU with sum T.
    """
    return torch.stack([part.sum() for part in torch.split(values, seq_lens.tolist())])


def broadcast_to_tokens(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(B,) -> (T,): each sequence's value at all of its tokens.

    Args:
        values: (B,) on any device.
        seq_lens: (B,) int64 on the CPU.

    Raises:
        BatchError: ``values`` is not one number per sequence.
    """
    if values.shape != seq_lens.shape:
        raise BatchError(
            f"values has shape {tuple(values.shape)}; expected one number for each of the {seq_lens.shape[0]} sequences"
        )
    tokens = int(seq_lens.sum())
    return torch.repeat_interleave(values, seq_lens.to(values.device), output_size=tokens)


def check_packed(seq_lens: Tensor, **tensors: Tensor) -> None:
    """Raises :class:`BatchError` for a tensor, given by its name, that is not (T,) with T the sum of ``seq_lens``."""
    tokens = int(seq_lens.sum())
    for name, tensor in tensors.items():
        if tensor.shape != (tokens,):
            raise BatchError(f"{name} has shape {tuple(tensor.shape)}; expected ({tokens},), the sum of seq_lens", name=name)


def check_finite(loss_mask: Tensor, **tensors: Tensor) -> None:
    """Raises :class:`BatchError` for a (T,) tensor, given by its name, that is not finite where ``loss_mask`` is not 0."""
    for name, tensor in tensors.items():
        bad = torch.nonzero((loss_mask != 0) & ~torch.isfinite(tensor)).flatten().tolist()
        if bad:
            raise BatchError(
                f"{name}[{bad[0]}] is {tensor[bad[0]].item()}; every selected token needs a finite one", name=name
            )


def required_log_probs(model_output: ModelOutput) -> Tensor:
    """``model_output.log_probs``, (T,); raises :class:`BatchError` where the model gave none, or several for each token."""
    log_probs = every_log_prob(model_output)
    if log_probs.dim() != 1:
        raise BatchError(f"log_probs has shape {tuple(log_probs.shape)}; this loss takes one target_ids for each token")
    return log_probs


def every_log_prob(model_output: ModelOutput) -> Tensor:
    """``model_output.log_probs``, (T,) or (T, K); raises :class:`BatchError` when the model did not give them."""
    if model_output.log_probs is None:
        raise BatchError("the model output has no log_probs; this loss needs a model with a language-model head")
    return model_output.log_probs


def required_values(model_output: ModelOutput) -> Tensor:
    """``model_output.values``; raises :class:`BatchError` when the model did not give them."""
    if model_output.values is None:
        raise BatchError("the model output has no values; this loss needs a critic: build_model(head='values')")
    return model_output.values


def differentiable_entropy(model_output: ModelOutput) -> Tensor:
    """``model_output.entropy``, with a gradient wherever ``log_probs`` has one; raises :class:`BatchError` without it."""
    entropy = model_output.entropy
    if entropy is None:
        raise BatchError("entropy_coef needs the entropy; set meta['calculate_entropy'] to True in every micro-batch")
    if required_log_probs(model_output).requires_grad and not entropy.requires_grad:
        raise BatchError("entropy_coef needs an entropy with a gradient; this model gives it without one")
    return entropy


def token_advantages(data: PackedBatch) -> Tensor:
    """(T,): the token field ``advantages``, or else the sequence field of that name, (B,), at all tokens; raises
    :class:`BatchError` without either, and for other shapes.
    """
    if "advantages" not in data.token_fields and "advantages" in data.sequence_fields:
        return broadcast_to_tokens(data.sequence_fields["advantages"], data.seq_lens)
    return token_vector(data, "advantages")


def token_vector(data: PackedBatch, name: str) -> Tensor:
    """A token field that must be (T,); raises :class:`BatchError` when it is missing or has more dimensions."""
    value = data.token_field(name)
    if value.dim() != 1:
        raise BatchError(f"token field {name!r} has shape {tuple(value.shape)}; expected (T,)", name=name)
    return value


type LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode.__value__)


def check_not_negative(**options: float) -> None:
    """Raises :class:`ConfigError` for an option, given by its name, that is negative or not finite."""
    for name, value in options.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError.of(name, value, "must be a finite number, 0 or above")


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
    episode_share: Tensor | None = None,
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
            with loss 0. ``sum`` divides by nothing; as a metric it is the mean over tokens.
        episode_share: (B,), of :data:`~rl_backend.contracts.EPISODE_SHARE`: the sequences of an episode count as one, whose
            tokens are those of all of them. None: each sequence is an episode.
        loss_scale_factor: what ``seq-mean-token-sum-norm`` divides by: a constant, for example the longest response.

    Raises:
        ConfigError: the mode or the scale factor.
    """
    check_loss_agg_mode(mode, loss_scale_factor)
    weights = loss_mask.to(token_losses.dtype)
    if mode in ("token-mean", "sum"):
        return masked_sum(token_losses, weights), weights.sum()
    shares = token_losses.new_ones(seq_lens.shape[0]) if episode_share is None else episode_share.to(token_losses)
    sequences = shares.sum()
    sums = sum_by_sequence(zero_masked(token_losses, weights) * weights, seq_lens)
    if mode == "seq-mean-token-mean":
        count = sum_by_sequence(weights, seq_lens)
        sums = sums / count.where(count > 0, 1.0) * shares
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

    Reads ``dp_size`` and ``batch_num_tokens`` (``token-mean``) or ``global_batch_size`` (means over sequences) from
    ``data.meta``; counts of this micro-batch never stand in for them. ``sum`` has no denominator, and gradients of several
    calls add up to that of all their tokens. The factor ``dp_size`` undoes the average that data parallelism takes of
    gradients.

    Args:
        token_losses, loss_mask, mode, loss_scale_factor: as in :func:`aggregation_terms`.

    Raises:
        BatchError: a denominator is missing from ``data.meta`` or is not positive.
        ConfigError: the mode or the scale factor.
    """
    share = data.sequence_fields.get(EPISODE_SHARE)
    total, _ = aggregation_terms(
        token_losses, loss_mask, data.seq_lens, mode, loss_scale_factor=loss_scale_factor, episode_share=share
    )
    dp_size = _positive_number(data, "dp_size")
    if mode == "sum":
        return total * dp_size
    return total / _positive_number(data, "batch_num_tokens" if mode == "token-mean" else "global_batch_size") * dp_size


def _positive_number(data: PackedBatch, name: str) -> float:
    if data.meta.get(name) is None:
        raise BatchError(f"meta[{name!r}] is missing; the batch has {sorted(data.meta)}", name=name)
    number = float(data.meta[name])
    if not (math.isfinite(number) and number > 0):
        raise BatchError(f"meta[{name!r}] is {number}; it must be above 0: a batch without response tokens has no loss")
    return number
