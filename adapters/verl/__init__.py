"""verl's interfaces onto ours: data files and reward functions. Importing this package does not import verl."""

from adapters.verl.dataset import ChatMessage, PromptExample, read_examples
from adapters.verl.reward import RewardFunction, load_reward_function, score_value

__all__ = [
    "ChatMessage",
    "PromptExample",
    "RewardFunction",
    "load_reward_function",
    "read_examples",
    "score_value",
]
