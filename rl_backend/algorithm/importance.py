"""Truncated importance sampling: what to weigh tokens with that another implementation of the policy sampled."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import Tensor

from rl_backend.algorithm.masking import zero_masked
from rl_backend.algorithm.sequences import broadcast_to_tokens, sum_by_sequence
from rl_backend.contracts import ConfigError

type ImportanceLevel = Literal["token", "sequence"]

IMPORTANCE_LEVELS: tuple[str, ...] = get_args(ImportanceLevel.__value__)


def check_importance_options(cap: float, level: str) -> None:
    """Raises :class:`ConfigError` for a cap that is not a finite number above 0 or an unknown level."""
    if not (math.isfinite(cap) and cap > 0):
        raise ConfigError.of("tis_cap", cap, "must be a finite number above 0, usually 2; None switches it off")
    if level not in IMPORTANCE_LEVELS:
        raise ConfigError.of("tis_level", level, f"must be one of {', '.join(IMPORTANCE_LEVELS)}")


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
        old_log_probs: (T,), of the sampled tokens by the trainer, at the weights that sampled them.
        rollout_log_probs: (T,), of the same tokens by the engine that sampled them.
        loss_mask: (T,); nonzero on response tokens.
        seq_lens: (B,) int64 on the CPU.
        cap: largest weight.
        level: ``token`` or ``sequence``.

    Raises:
        ConfigError: the cap or the level.
    """
    check_importance_options(cap, level)
    log_ratio = zero_masked(old_log_probs - rollout_log_probs, loss_mask).detach()
    if level == "sequence":
        log_ratio = broadcast_to_tokens(sum_by_sequence(log_ratio, seq_lens), seq_lens)
    return zero_masked(log_ratio.clamp(min=-20.0, max=20.0).exp().clamp(max=cap), loss_mask)
