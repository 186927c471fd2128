"""Policy-gradient surrogates, one loss per token, and importance weights for tokens that another policy sampled.

All read the other tensors only where ``loss_mask`` is not 0. The importance weight of a token is
``exp(old_log_probs - rollout_log_probs)``: ``old_log_probs`` by the trainer, at its weights when the step began;
``rollout_log_probs`` by the engine, at the weights that sampled. It corrects for an engine that computes differently, and
for a sample that is some updates old.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backend.algorithm.loss_aggregation import (
    broadcast_to_tokens,
    check_not_negative,
    sum_by_sequence,
    token_mean_metric,
    zero_masked,
)
from rl_backend.contracts import ConfigError

type MetricPair = tuple[Tensor, Tensor]

IMPORTANCE_LEVELS = ("token", "sequence")


def check_clip_options(clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None = None) -> None:
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
    [-20, 20], beyond which the gradient is 0. All tensors are (T,).

    Sources: PPO, https://arxiv.org/abs/1707.06347, equation 7; two clip ratios, DAPO, https://arxiv.org/abs/2503.14476;
    dual clip, https://arxiv.org/abs/1912.09729, equation 5; as in verl's ``compute_policy_loss_vanilla``.

    Returns:
        (T,) losses, 0 where ``loss_mask`` is 0, and metrics over the selected tokens: ``clip_fraction`` (the upper bound
        of the objective was active), ``clip_fraction_lower`` (the dual clip was; only with ``clip_ratio_c``),
        ``approx_kl`` (mean of ``old_log_probs - log_probs``, nats).
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
    token with that token's own advantage. ``log s`` is at most 10, beyond which the gradient is 0. Sequences are complete.

    Sources: GSPO, https://arxiv.org/abs/2507.18071, sections 4.1 and 4.3 (GSPO-token), clip ratios of its experiments;
    verl's ``compute_policy_loss_gspo``. Arguments, result and errors as of :func:`clipped_policy_loss`, without
    ``clip_fraction_lower``; ``seq_lens``: (B,) int64 on the CPU.
    """
    check_clip_options(clip_ratio_low, clip_ratio_high)
    log_probs = zero_masked(log_probs, loss_mask)
    log_ratio = (log_probs - zero_masked(old_log_probs, loss_mask)).detach()
    count = sum_by_sequence((loss_mask != 0).to(log_ratio.dtype), seq_lens).clamp(min=1.0)
    # GSPO-token: the value is the sequence's ratio, and each token keeps its own gradient.
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
    verl's ``compute_policy_loss_cispo``. Arguments, result and errors as of :func:`clipped_policy_loss`, without
    ``clip_fraction_lower``; ``clip_fraction`` counts ratios beyond either bound.
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
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(min=1.0 - clip_ratio_low, max=1.0 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def check_importance_options(
    tis_cap: float | None, mis_bounds: Sequence[float] | None, importance_level: str, importance_veto: float | None
) -> None:
    wrong: list[tuple[str, object, str]] = []
    if tis_cap is not None and not (math.isfinite(tis_cap) and tis_cap > 0):
        wrong.append(("tis_cap", tis_cap, "must be a finite number above 0, usually 2; None switches it off"))
    if mis_bounds is not None and tis_cap is not None:
        wrong.append(("mis_bounds", mis_bounds, f"weights are masked or truncated (tis_cap={tis_cap}), not both"))
    if mis_bounds is not None and (len(mis_bounds) != 2 or not 0 <= mis_bounds[0] <= 1 <= mis_bounds[1] < math.inf):
        expected = "must be (low, high) with 0 <= low <= 1 <= high, for example (0.5, 2.0)"
        wrong.append(("mis_bounds", mis_bounds, expected))
    if importance_level not in IMPORTANCE_LEVELS:
        wrong.append(("importance_level", importance_level, f"must be one of {', '.join(IMPORTANCE_LEVELS)}"))
    elif importance_level != "token" and tis_cap is None and mis_bounds is None:
        wrong.append(("importance_level", importance_level, "needs tis_cap or mis_bounds; without weights it is unused"))
    if importance_veto is not None and not 0 < importance_veto < 1:
        wrong.append(("importance_veto", importance_veto, "must be within (0, 1), for example 1e-4; None: no veto"))
    ConfigError.refuse_all(wrong)


def truncated_importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    *,
    cap: float,
    level: str = "token",
) -> Tensor:
    """``min(exp(old_log_probs - rollout_log_probs), cap)``: (T,), detached, 0 where ``loss_mask`` is 0.

    With level ``sequence`` it is the product over the selected tokens of a sequence, one weight for all of them: unbiased
    before the cap, with a variance that grows with the length. The logarithm of a weight is limited to [-20, 20].

    Sources: truncated importance sampling, Ionides 2008, https://doi.org/10.1198/106186008X320456; for the mismatch between
    trainer and rollout engine, https://fengyao.notion.site/off-policy-rl; verl's ``compute_rollout_correction_weights``.

    Tensors are (T,), ``seq_lens`` is (B,) int64 on the CPU.
    """
    check_importance_options(cap, None, level, None)
    weights = _weights(old_log_probs, rollout_log_probs, loss_mask, seq_lens, level)
    return zero_masked(weights.clamp(max=cap), loss_mask)


def masked_importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    loss_mask: Tensor,
    seq_lens: Tensor,
    *,
    bounds: Sequence[float],
    level: str = "token",
) -> Tensor:
    """The weight within ``bounds``, ends included, 0 outside: (T,), detached, 0 where ``loss_mask`` is 0.

    A weight that a cap would only shrink drops its token here (``token``), or its whole sequence (``sequence``).

    Sources: IcePop, https://arxiv.org/abs/2510.18855; by sequence, https://richardli.xyz/rl-collapse; verl's
    ``compute_rollout_correction_weights`` with ``rollout_is_threshold="low_high"``. Other arguments as of
    :func:`truncated_importance_weights`.
    """
    check_importance_options(None, bounds, level, None)
    weights = _weights(old_log_probs, rollout_log_probs, loss_mask, seq_lens, level)
    low, high = bounds
    return zero_masked(torch.where((weights >= low) & (weights <= high), weights, 0.0), loss_mask)


def sequences_without_veto(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, seq_lens: Tensor, *, veto: float
) -> Tensor:
    """(T,) bool: False at every token of a sequence in which the weight of any selected token is below ``veto``.

    The trainer holds such a token for all but impossible, and what follows it was written in a state that the trained policy
    does not reach. Source: https://richardli.xyz/rl-collapse; verl rejects on both sides, with ``seq_max_k2``. Arguments as
    of :func:`truncated_importance_weights`.
    """
    check_importance_options(None, None, "token", veto)
    log_ratio = zero_masked(old_log_probs - rollout_log_probs, loss_mask).detach()
    impossible = (log_ratio < math.log(veto)).to(log_ratio.dtype)
    return broadcast_to_tokens(sum_by_sequence(impossible, seq_lens), seq_lens) == 0


def _weights(old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, seq_lens: Tensor, level: str) -> Tensor:
    log_ratio = zero_masked(old_log_probs - rollout_log_probs, loss_mask).detach()
    if level == "sequence":
        log_ratio = broadcast_to_tokens(sum_by_sequence(log_ratio, seq_lens), seq_lens)
    return log_ratio.clamp(min=-20.0, max=20.0).exp()
