"""Limits of episodes."""

from pydantic import Field

from rl_backend.contracts import BaseConfig


class Limits(BaseConfig):
    """What an episode may come to; None is endless, as far as the engine's context reaches.

    Attributes:
        turns: of an episode.
        turn_tokens: sampled in one turn.
        sampled_tokens: sampled in an episode.
        episode_tokens: of an episode's longest prompt and turn together.
        tool_calls: of an episode.
        step_seconds: of one step of the environment, and of one call of a tool.
        episode_seconds: of an episode, from its beginning.
        concurrent: episodes at once.
    """

    turns: int | None = Field(default=None, ge=1)
    turn_tokens: int | None = Field(default=None, ge=1)
    sampled_tokens: int | None = Field(default=None, ge=1)
    episode_tokens: int | None = Field(default=None, ge=2)
    tool_calls: int | None = Field(default=None, ge=1)
    step_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    episode_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    concurrent: int | None = Field(default=None, ge=1)
