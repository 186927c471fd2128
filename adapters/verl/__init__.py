"""verl's engines on this package's runtimes. Here: verl's data files and reward functions, without importing verl."""

from rl_backend.data.prompts import ChatMessage, PromptExample, read_examples
from rl_backend.data.rewards import RewardFunction, load_reward_function, score_value

__all__ = [
    "ChatMessage",
    "PromptExample",
    "RewardFunction",
    "load_reward_function",
    "read_examples",
    "score_value",
]
