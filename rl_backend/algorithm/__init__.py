"""Advantages and losses: pure tensor functions on packed data."""

from rl_backend.algorithm.advantages import grpo_advantages
from rl_backend.algorithm.aggregation import LOSS_AGG_MODES, LossAggMode, aggregate_loss, aggregation_terms
from rl_backend.algorithm.grpo import grpo_loss
from rl_backend.algorithm.importance import IMPORTANCE_LEVELS, ImportanceLevel, truncated_importance_weights
from rl_backend.algorithm.kl import KL_TYPES, kl_penalty
from rl_backend.algorithm.masking import masked_sum, token_mean_metric, zero_masked
from rl_backend.algorithm.policy_loss import clipped_policy_loss
from rl_backend.algorithm.sequences import broadcast_to_tokens, sum_by_sequence
from rl_backend.algorithm.sft import sft_loss

__all__ = [
    "IMPORTANCE_LEVELS",
    "KL_TYPES",
    "LOSS_AGG_MODES",
    "ImportanceLevel",
    "LossAggMode",
    "aggregate_loss",
    "aggregation_terms",
    "broadcast_to_tokens",
    "clipped_policy_loss",
    "grpo_advantages",
    "grpo_loss",
    "kl_penalty",
    "masked_sum",
    "sft_loss",
    "sum_by_sequence",
    "token_mean_metric",
    "truncated_importance_weights",
    "zero_masked",
]
