"""Reward functions of verl's signature or TRL's: loaded, called one by one or many at once, and what they return."""

from rl_backend.data.rewards.function import LoadedReward as LoadedReward
from rl_backend.data.rewards.function import OnFailure as OnFailure
from rl_backend.data.rewards.function import RewardCall as RewardCall
from rl_backend.data.rewards.function import RewardFunction as RewardFunction
from rl_backend.data.rewards.function import Score as Score
from rl_backend.data.rewards.function import load_reward as load_reward
from rl_backend.data.rewards.function import reward_metrics as reward_metrics
from rl_backend.data.rewards.function import score_value as score_value
from rl_backend.data.rewards.scorer import RewardConfig as RewardConfig
from rl_backend.data.rewards.scorer import RewardScorer as RewardScorer
from rl_backend.data.rewards.scorer import Scoring as Scoring
from rl_backend.data.rewards.scorer import WeightedReward as WeightedReward
