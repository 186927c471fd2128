"""Importance weights of tokens that another policy sampled than the one that is trained.

The weight of a token is ``exp(old_log_probs - rollout_log_probs)``: ``old_log_probs`` by the trainer, at its weights when
the step began; ``rollout_log_probs`` by the engine, at the weights that sampled. It corrects for both of their differences:
an engine that computes otherwise than the trainer, and a sample that is some updates old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from rl_backend.algorithm.aggregation import broadcast_to_tokens, sum_by_sequence, zero_masked
from rl_backend.contracts import ConfigError

type ImportanceLevel = Literal["token", "sequence"]

IMPORTANCE_LEVELS: tuple[str, ...] = get_args(ImportanceLevel.__value__)


def check_importance_options(
    tis_cap: float | None, mis_bounds: Sequence[float] | None, importance_level: str, importance_veto: float | None
) -> None:
    """Raises :class:`ConfigError` for a bound out of its range, truncation together with masking, or an unused level."""
    if tis_cap is not None and not (math.isfinite(tis_cap) and tis_cap > 0):
        raise ConfigError.of("tis_cap", tis_cap, "must be a finite number above 0, usually 2; None switches it off")
    if mis_bounds is not None:
        if tis_cap is not None:
            raise ConfigError.of("mis_bounds", mis_bounds, f"weights are masked or truncated (tis_cap={tis_cap}), not both")
        if len(mis_bounds) != 2 or not (0 <= mis_bounds[0] <= 1 <= mis_bounds[1] < math.inf):
            raise ConfigError.of(
                "mis_bounds", mis_bounds, "must be (low, high) with 0 <= low <= 1 <= high, for example (0.5, 2.0)"
            )
    if importance_level not in IMPORTANCE_LEVELS:
        raise ConfigError.of("importance_level", importance_level, f"must be one of {', '.join(IMPORTANCE_LEVELS)}")
    if importance_level != "token" and tis_cap is None and mis_bounds is None:
        raise ConfigError.of(
            "importance_level", importance_level, "needs tis_cap or mis_bounds; without weights it is unused"
        )
    if importance_veto is not None and not 0 < importance_veto < 1:
        raise ConfigError.of("importance_veto", importance_veto, "must be within (0, 1), for example 1e-4; None: no veto")


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

    ``sequence`` takes the product over the selected tokens of a sequence instead, one weight for all of them: unbiased
    before the cap, with a variance that grows with the length. The logarithm of a weight is limited to [-20, 20].

    Sources: truncated importance sampling, Ionides 2008, https://doi.org/10.1198/106186008X320456; for the mismatch between
    trainer and rollout engine, https://fengyao.notion.site/off-policy-rl; limits as in verl's
    ``compute_rollout_correction_weights``.

    Args:
        old_log_probs: (T,), of the sampled tokens by the trainer.
        rollout_log_probs: (T,), of the same tokens by the engine that sampled them.
        loss_mask: (T,); nonzero on response tokens.
        seq_lens: (B,) int64 on the CPU.
        cap: largest weight.
        level: ``token`` or ``sequence``.

    Raises:
        ConfigError: the cap or the level.
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
    """The weight within ``bounds``, 0 outside: (T,), detached, 0 where ``loss_mask`` is 0.

    A weight that a cap would only shrink drops its token here (``token``), or its whole sequence (``sequence``).

    Sources: IcePop, https://arxiv.org/abs/2510.18855; by sequence, https://richardli.xyz/rl-collapse; verl's
    ``compute_rollout_correction_weights`` with ``rollout_is_threshold="low_high"``.

    Args:
        bounds: (low, high) with 0 <= low <= 1 <= high; weights equal to a bound are kept.
        old_log_probs, rollout_log_probs, loss_mask, seq_lens, level: as in :func:`truncated_importance_weights`.

    Raises:
        ConfigError: the bounds or the level.
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
    does not reach. Source: https://richardli.xyz/rl-collapse; verl rejects on both sides, with ``seq_max_k2``.

    Args:
        veto: within (0, 1).
        old_log_probs, rollout_log_probs, loss_mask, seq_lens: as in :func:`truncated_importance_weights`.

    Raises:
        ConfigError: ``veto``.
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
