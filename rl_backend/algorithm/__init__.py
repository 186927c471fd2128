"""Advantages and losses: pure tensor functions on packed data."""

from rl_backend.algorithm.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    dr_grpo_advantages,
    groups_with_signal,
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    rloo_advantages,
)
from rl_backend.algorithm.aggregation import (
    LOSS_AGG_MODES,
    LossAggMode,
    aggregate_loss,
    aggregation_terms,
    broadcast_to_tokens,
    masked_sum,
    sum_by_sequence,
    token_mean_metric,
    zero_masked,
)
from rl_backend.algorithm.importance import (
    IMPORTANCE_LEVELS,
    ImportanceLevel,
    masked_importance_weights,
    sequences_without_veto,
    truncated_importance_weights,
)
from rl_backend.algorithm.policy import SURROGATES, Surrogate, cispo_loss, grpo_loss, gspo_loss, policy_loss, sft_loss
from rl_backend.algorithm.rewards import KL_TYPES, kl_in_reward, kl_penalty, overlong_penalty, token_rewards
from rl_backend.algorithm.surrogates import cispo_policy_loss, clipped_policy_loss, gspo_policy_loss
from rl_backend.algorithm.value import explained_variance, gae_advantages, masked_whiten, value_loss

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "IMPORTANCE_LEVELS",
    "KL_TYPES",
    "LOSS_AGG_MODES",
    "SURROGATES",
    "AdvantageEstimator",
    "ImportanceLevel",
    "LossAggMode",
    "Surrogate",
    "aggregate_loss",
    "aggregation_terms",
    "broadcast_to_tokens",
    "cispo_loss",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "dr_grpo_advantages",
    "explained_variance",
    "gae_advantages",
    "groups_with_signal",
    "grpo_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_policy_loss",
    "kl_in_reward",
    "kl_penalty",
    "masked_importance_weights",
    "masked_sum",
    "masked_whiten",
    "overlong_penalty",
    "policy_loss",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "rloo_advantages",
    "sequences_without_veto",
    "sft_loss",
    "sum_by_sequence",
    "token_mean_metric",
    "token_rewards",
    "truncated_importance_weights",
    "value_loss",
    "zero_masked",
]
