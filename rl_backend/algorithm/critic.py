"""Critics: advantages per token from their values (GAE), whitening, and their loss.

At position t the state is the sequence up to and with token t, the action is the choice of token t+1, and ``values[t]`` is
the value of that state. So entry t of all tensors is about one and the same action, and nothing is shifted.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_backend.algorithm.loss_aggregation import (
    aggregate_loss,
    aggregation_terms,
    check_finite,
    check_loss_agg_mode,
    check_packed,
    required_output,
    token_mean_metric,
    token_vector,
    zero_masked,
)
from rl_backend.contracts import EPISODE_SHARE, BatchError, ConfigError, MetricValue, ModelOutput, PackedBatch


def masked_whiten(values: Tensor, loss_mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """``(values - mean) / sqrt(variance + 1e-8)`` over the selected tokens, with the unbiased variance: (T,), 0 elsewhere.

    The batch must be whole: all sequences of all ranks in this step. Source: verl's ``masked_whiten``; ``shift_mean=False``
    puts the mean back after the scaling. Raises :class:`BatchError` for a selected value that is not finite.
    """
    check_finite(loss_mask, values=values)
    # In float64: whitening takes differences of numbers that may be large.
    chosen = values.detach()[loss_mask != 0].to(torch.float64)
    # The variance of a single value is 0 here, where the unbiased one would be NaN.
    variance, mean = torch.var_mean(chosen, correction=min(1, chosen.numel() - 1))
    whitened = (chosen - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.zeros_like(values.detach()).masked_scatter(loss_mask != 0, whitened.to(values.dtype))


@torch.no_grad()
def gae_advantages(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    final_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: ``A_t = delta_t + gamma lam A_next``, ``delta_t = r_t + gamma V_next - V_t``.

    ``next`` is the next *selected* token of the same sequence: tokens that the policy did not choose are stepped over
    without discount. Sources: GAE, https://arxiv.org/abs/1506.02438, equation 16; verl's ``compute_gae_advantage_return``,
    which whitens the advantages too.

    Args:
        token_rewards, values: (T,) floating, not read where ``loss_mask``, (T,), is 0.
        seq_lens: (B,) int64 on the CPU.
        final_values: (B,), V_next of each sequence's last selected token: of the state in which an episode was cut off, and
            0 where it ended. Source: time limits as cuts, https://arxiv.org/abs/1712.00378. None is 0 for all.

    Returns:
        Advantages and returns (``advantages + values``, what the critic learns), (T,) each, in the wider dtype of
        ``token_rewards`` and ``values``, without gradient, 0 where ``loss_mask`` is 0.

    Raises:
        BatchError: shapes, or a reward or value of a selected token that is not finite.
        ConfigError: ``gamma`` or ``lam`` outside of [0, 1].
    """
    shares = {"gamma": gamma, "lam": lam}
    ConfigError.refuse_all((name, share, "must be within [0, 1]") for name, share in shares.items() if not 0 <= share <= 1)
    check_packed(seq_lens, token_rewards=token_rewards, values=values, loss_mask=loss_mask)
    check_finite(loss_mask, token_rewards=token_rewards, values=values)

    # Over selected tokens alone: what a tool answered inside a response was not the policy's choice.
    selected = loss_mask != 0
    counts = [int(part.sum()) for part in torch.split(selected, seq_lens.tolist())]
    # Rows hold selected tokens alone, so the next column is the next action of the same sequence.
    rewards = _one_row_per_sequence(token_rewards[selected], counts)
    state_values = _one_row_per_sequence(values[selected], counts)
    next_values = torch.nn.functional.pad(state_values[:, 1:], (0, 1))
    if final_values is not None:
        if final_values.shape != seq_lens.shape or not bool(torch.isfinite(final_values).all()):
            problem = f"final_values must be {len(counts)} finite numbers, one for each sequence"
            raise BatchError(problem, name="final_values")
        acting = [row for row, count in enumerate(counts) if count]
        next_values[acting, [counts[row] - 1 for row in acting]] = final_values.to(next_values)[acting]
    deltas = rewards + gamma * next_values - state_values

    # Backwards in time, all sequences at once. The padding behind a short sequence is 0 and leaves it unchanged.
    rows = torch.zeros_like(deltas)
    following = deltas.new_zeros(len(counts))
    for column in reversed(range(deltas.shape[1])):
        following = deltas[:, column] + gamma * lam * following
        rows[:, column] = following
    real = torch.arange(deltas.shape[1], device=deltas.device) < torch.tensor(counts, device=deltas.device)[:, None]
    # The critic's float32 must not round rewards of float64, whose differences the advantages are.
    dtype = torch.promote_types(token_rewards.dtype, values.dtype)
    zeros = torch.zeros_like(values, dtype=dtype)
    advantages = zeros.masked_scatter(selected, rows[real].to(dtype))
    returns = zeros.masked_scatter(selected, (rows + state_values)[real].to(dtype))
    return advantages, returns


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the selected tokens; NaN when the returns are all equal."""
    selected = loss_mask != 0
    chosen = returns[selected].to(torch.float64)
    if chosen.numel() == 0 or bool((chosen == chosen[0]).all()):
        return float("nan")
    error = chosen - values[selected].to(torch.float64)
    # Without correction: both variances would have the same factor.
    return 1.0 - (error.var(correction=0) / chosen.var(correction=0)).item()


def _one_row_per_sequence(selected: Tensor, counts: list[int]) -> Tensor:
    parts = torch.split(selected.to(torch.float64), counts)
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


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

    Reads the token fields ``loss_mask``, ``returns`` and, with ``cliprange_value`` (c), ``old_values``, each (T,).
    Sources: PPO's code, https://arxiv.org/abs/2005.12729, section 3; verl's ``compute_value_loss``.

    Returns:
        The loss, and metrics as (sum, weight) pairs: ``value_loss`` (the mean that is optimised), ``value_mean``,
        ``return_mean``; ``value_clip_fraction`` with ``cliprange_value``.

    Raises:
        BatchError: a field, output or denominator that is missing or has another shape.
    """
    if cliprange_value is not None and not (math.isfinite(cliprange_value) and cliprange_value > 0):
        raise ConfigError.of("cliprange_value", cliprange_value, "must be a finite number above 0; None switches it off")
    check_loss_agg_mode(loss_agg_mode, loss_scale_factor)

    loss_mask = token_vector(data, "loss_mask")
    values = zero_masked(required_output(model_output, "values"), loss_mask)
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
    # The metric has local denominators, so that its mean is right however the batch was split.
    metrics["value_loss"] = aggregation_terms(
        losses.detach(),
        loss_mask,
        data.seq_lens,
        loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        episode_share=data.sequence_fields.get(EPISODE_SHARE),
    )
    return aggregate_loss(losses, loss_mask, data, loss_agg_mode, loss_scale_factor=loss_scale_factor), metrics
