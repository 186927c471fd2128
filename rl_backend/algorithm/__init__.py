"""Advantages and losses: pure tensor functions on packed data."""

from rl_backend.algorithm.advantages import ADVANTAGE_ESTIMATORS as ADVANTAGE_ESTIMATORS
from rl_backend.algorithm.advantages import AdvantageEstimator as AdvantageEstimator
from rl_backend.algorithm.advantages import dr_grpo_advantages as dr_grpo_advantages
from rl_backend.algorithm.advantages import groups_with_signal as groups_with_signal
from rl_backend.algorithm.advantages import grpo_advantages as grpo_advantages
from rl_backend.algorithm.advantages import kl_in_reward as kl_in_reward
from rl_backend.algorithm.advantages import overlong_penalty as overlong_penalty
from rl_backend.algorithm.advantages import reinforce_plus_plus_advantages as reinforce_plus_plus_advantages
from rl_backend.algorithm.advantages import (
    reinforce_plus_plus_baseline_advantages as reinforce_plus_plus_baseline_advantages,
)
from rl_backend.algorithm.advantages import rloo_advantages as rloo_advantages
from rl_backend.algorithm.advantages import token_rewards as token_rewards
from rl_backend.algorithm.critic import explained_variance as explained_variance
from rl_backend.algorithm.critic import gae_advantages as gae_advantages
from rl_backend.algorithm.critic import masked_whiten as masked_whiten
from rl_backend.algorithm.critic import value_loss as value_loss
from rl_backend.algorithm.loss_aggregation import LOSS_AGG_MODES as LOSS_AGG_MODES
from rl_backend.algorithm.loss_aggregation import LossAggMode as LossAggMode
from rl_backend.algorithm.loss_aggregation import aggregate_loss as aggregate_loss
from rl_backend.algorithm.loss_aggregation import broadcast_to_tokens as broadcast_to_tokens
from rl_backend.algorithm.loss_aggregation import masked_sum as masked_sum
from rl_backend.algorithm.loss_aggregation import token_mean_metric as token_mean_metric
from rl_backend.algorithm.loss_aggregation import zero_masked as zero_masked
from rl_backend.algorithm.policy import cispo_loss as cispo_loss
from rl_backend.algorithm.policy import distillation_loss as distillation_loss
from rl_backend.algorithm.policy import grpo_loss as grpo_loss
from rl_backend.algorithm.policy import gspo_loss as gspo_loss
from rl_backend.algorithm.policy import kl_penalty as kl_penalty
from rl_backend.algorithm.policy import policy_loss as policy_loss
from rl_backend.algorithm.policy import sft_loss as sft_loss
from rl_backend.algorithm.sequences import episode_lengths as episode_lengths
from rl_backend.algorithm.sequences import episode_parts as episode_parts
from rl_backend.algorithm.sequences import episode_rewards as episode_rewards
from rl_backend.algorithm.sequences import episode_sequences as episode_sequences
from rl_backend.algorithm.surrogates import cispo_policy_loss as cispo_policy_loss
from rl_backend.algorithm.surrogates import clipped_policy_loss as clipped_policy_loss
from rl_backend.algorithm.surrogates import gspo_policy_loss as gspo_policy_loss
from rl_backend.algorithm.surrogates import masked_importance_weights as masked_importance_weights
from rl_backend.algorithm.surrogates import sequences_without_veto as sequences_without_veto
from rl_backend.algorithm.surrogates import truncated_importance_weights as truncated_importance_weights
