"""Losses of tokens as the loss of a micro-batch, over denominators of the whole batch.

The sum over any split into micro-batches, averaged over data-parallel ranks, is the same loss with the same gradient.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, ModelOutput, PackedBatch


def zero_masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """``values`` with 0 where ``loss_mask`` is 0, both (T,).

    Apply it to the inputs of an expression: a NaN that is masked only in the result still reaches the gradient, as 0 * NaN.
    """
    return torch.where(loss_mask != 0, values, 0.0)


def masked_sum(values: Tensor, loss_mask: Tensor) -> Tensor:
    return (zero_masked(values, loss_mask) * loss_mask).sum()


def token_mean_metric(values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ``values`` over the selected tokens as a metric: (sum, weight), both 0-d and detached."""
    return masked_sum(values.detach(), loss_mask), loss_mask.sum().to(values.dtype)


def sum_by_sequence(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(T,) -> (B,): the sum over each sequence's tokens; differentiable. ``seq_lens``: (B,) int64 on the CPU."""
    # One sum per sequence instead of a scatter, because atomic additions on a GPU differ from run to run.
    return torch.stack([part.sum() for part in torch.split(values, seq_lens.tolist())])


def broadcast_to_tokens(values: Tensor, seq_lens: Tensor) -> Tensor:
    """(B,) -> (T,): each sequence's value, on any device, at all of its tokens."""
    # Without the size a GPU would be waited for, to learn how many tokens there are.
    tokens = int(seq_lens.sum())
    return torch.repeat_interleave(values, seq_lens.to(values.device, non_blocking=True), output_size=tokens)


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


_GIVEN_BY = {
    "log_probs": "this loss needs a model with a language-model head",
    "values": "this loss needs a critic: build_model(head='values')",
    "entropy": "entropy_coef needs it; set meta['calculate_entropy'] to True in every micro-batch",
}


def required_output(model_output: ModelOutput, name: str) -> Tensor:
    found: Tensor | None = getattr(model_output, name)
    if found is None:
        raise BatchError(f"the model output has no {name}; {_GIVEN_BY[name]}", name=name)
    return found


def differentiable_entropy(model_output: ModelOutput) -> Tensor:
    """With a gradient wherever ``log_probs`` has one; raises :class:`BatchError` without it."""
    entropy = required_output(model_output, "entropy")
    if required_output(model_output, "log_probs").requires_grad and not entropy.requires_grad:
        raise BatchError("entropy_coef needs an entropy with a gradient; this model gives it without one")
    return entropy


def token_advantages(data: PackedBatch) -> Tensor:
    """(T,): the token field ``advantages``, or else the sequence field of that name, (B,), at all tokens."""
    if "advantages" not in data.token_fields and "advantages" in data.sequence_fields:
        return broadcast_to_tokens(data.sequence_fields["advantages"], data.seq_lens)
    return token_vector(data, "advantages")


def token_vector(data: PackedBatch, name: str) -> Tensor:
    value = data.token_field(name)
    if value.dim() != 1:
        raise BatchError(f"token field {name!r} has shape {tuple(value.shape)}; expected (T,)", name=name)
    return value


type LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode.__value__)


def check_not_negative(**options: float) -> None:
    wrong = {name: value for name, value in options.items() if not (math.isfinite(value) and value >= 0)}
    ConfigError.refuse_all((name, value, "must be a finite number, 0 or above") for name, value in wrong.items())


def check_loss_agg_mode(mode: str, loss_scale_factor: float | None) -> None:
    if mode not in LOSS_AGG_MODES:
        raise ConfigError.of("loss_agg_mode", mode, f"must be one of {', '.join(LOSS_AGG_MODES)}")
    if mode != "seq-mean-token-sum-norm":
        fits, expected = loss_scale_factor is None, "does not use it; leave it None"
    else:
        fits = loss_scale_factor is not None and math.isfinite(loss_scale_factor) and loss_scale_factor > 0
        expected = "needs a finite number above 0, for example the longest response allowed"
    if not fits:
        raise ConfigError.of("loss_scale_factor", loss_scale_factor, f"loss_agg_mode={mode!r} {expected}")


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
        token_losses: (T,) floating; not read where ``loss_mask``, (T,) weights, is 0.
        mode: tokens, or sequences with the sum or mean of their tokens. A sequence without any selected token counts,
            with loss 0. ``sum`` divides by nothing; as a metric it is the mean over tokens.
        episode_share: (B,), of :data:`~rl_backend.contracts.EPISODE_SHARE`: the sequences of an episode count as one, whose
            tokens are those of all of them. None: each sequence is an episode.
        loss_scale_factor: what ``seq-mean-token-sum-norm`` divides by: a constant, for example the longest response.
    """
    check_loss_agg_mode(mode, loss_scale_factor)
    if token_losses.shape != loss_mask.shape:
        # As with several target_ids for each token, for a loss that takes one: (T, 1) and (T,) would make (T, T).
        raise BatchError(
            f"losses of shape {tuple(token_losses.shape)} for a loss_mask of shape {tuple(loss_mask.shape)}; expected (T,)"
        )
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
    ``data.meta``. The factor ``dp_size`` undoes the average that data parallelism takes of gradients. ``sum`` has no
    denominator: gradients of several calls add up to that of all their tokens.

    Raises :class:`BatchError` for a denominator that is missing or not positive.
    """
    share = data.sequence_fields.get(EPISODE_SHARE)
    total, _ = aggregation_terms(
        token_losses, loss_mask, data.seq_lens, mode, loss_scale_factor=loss_scale_factor, episode_share=share
    )
    dp_size = _positive_number(data, "dp_size")
    if mode == "sum":
        return total * dp_size
    # Counts of this micro-batch never stand in for these: they would weigh its tokens more than those of larger ones.
    name = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    return total / _positive_number(data, name) * dp_size


def _positive_number(data: PackedBatch, name: str) -> float:
    given = data.meta.get(name)
    number = math.nan if given is None else float(given)
    if not (math.isfinite(number) and number > 0):
        raise BatchError(
            f"meta[{name!r}] is {given}; it must be above 0, and a batch without response tokens has no loss; the batch has "
            f"{sorted(data.meta)}",
            name=name,
        )
    return number
