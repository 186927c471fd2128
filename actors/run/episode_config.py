"""Options of a run whose samples are episodes of many turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from actors.rollout.lengths import positions_of
from actors.run.options import Follows, get, has
from actors.run.sampled_config import SampledConfig
from rl_backend.algorithm.episodes import Truncated
from rl_backend.contracts import MAY_CHANGE, SAME_CONTENTS, ConfigError, HasEffect
from rl_backend.data.config import DataConfig
from rl_backend.data.rewards import OnFailure
from rl_backend.environment import Limits
from rl_backend.environment.conversation import OtherEnd
from rl_backend.environment.parsers import PARSERS
from rl_backend.environment.rendering import History

_DROPS = HasEffect(lambda config: config.on_episode_failure == "drop", "only on_episode_failure='drop' leaves episodes out")
_STEPS = HasEffect(lambda config: config.environment, "a player samples by itself; leave it out")
_AHEAD = HasEffect(lambda config: config.batches_ahead, "max_staleness=0 samples nothing ahead; raise it")
_EPISODE_TOKENS = "limits.episode_tokens"


class EpisodeLimits(Limits):
    """Limits of a run's episodes, whose sequences need a bound to be trained on.

    Attributes:
        episode_tokens: of an episode's longest prompt and turn together.
    """

    episode_tokens: int = Field(default=4096, ge=2)


class EpisodeConfig(SampledConfig):
    """Those of every run that samples, and the environment."""

    short: ClassVar[Mapping[str, str]] = {
        **SampledConfig.short,
        "max_turns": "limits.turns",
        "max_episode_tokens": _EPISODE_TOKENS,
    }
    preset: ClassVar[Mapping[str, Any]] = {**SampledConfig.preset, _EPISODE_TOKENS: 4096}
    follows: ClassVar[Mapping[str, Follows]] = {
        **SampledConfig.follows,
        "limits.turn_tokens": Follows(
            lambda config: config.sampling.max_new_tokens, "follows from max_response_tokens; set that"
        ),
    }
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {
        "environment": (
            *("environment", "player", "score", "tool_format", "max_turns", "max_episode_tokens", "limits.", "on_cut"),
            *("history", "other_end", "on_episode_failure", "least_episodes", "truncated", "push_during_episodes"),
            "shuffle_rewards",
        )
    }
    metavars: ClassVar[Mapping[str, str]] = {**SampledConfig.metavars, "environment": "FILE.py:NAME"}
    example: ClassVar[str] = (
        "--model models/Qwen3-0.6B --dataset train.jsonl --environment my_environment.py:make --max-turns 8"
    )
    longest_is: ClassVar[str] = "max_episode_tokens"

    environment: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None,
        description="makes an episode's environment from a row and a seed, as path/file.py:name or package.module:name; "
        "see docs/environments.md",
    )
    player: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None, description="in its place: plays an episode by a loop of its own, from a row and a sampler"
    )
    score: Annotated[str | None, SAME_CONTENTS] = Field(
        default=None, description="function of a group's episodes, whose rewards are added to theirs"
    )
    tool_format: Annotated[str, _STEPS] = Field(
        default="hermes", min_length=1, description="of the calls that the model writes: hermes, json or pythonic"
    )
    on_cut: Annotated[Literal["continue", "end"], _STEPS] = Field(
        default="continue", description="a turn that is cut by max_response_tokens: continue the episode, or end it"
    )
    limits: EpisodeLimits = Field(default=EpisodeLimits(), description="what an episode may come to")
    history: Annotated[History | None, _STEPS] = Field(
        default=None,
        description="where the chat template changes earlier turns: keep them as sampled, or branch into a new sequence; "
        "none: such a template is refused",
    )
    other_end: Annotated[OtherEnd, _STEPS] = Field(
        default="replace",
        description="a turn that ended with another token than the template's: replace it by the template's, or keep it",
    )
    on_episode_failure: Annotated[OnFailure, MAY_CHANGE] = Field(
        default="drop",
        description="an episode that raised or took too long: stop the run, count as zero, or leave it out",
    )
    least_episodes: Annotated[int, MAY_CHANGE, _DROPS] = Field(
        default=2, ge=1, description="episodes that a group needs; one with fewer is left out as a whole"
    )
    push_during_episodes: Annotated[bool, _AHEAD] = Field(
        default=False,
        description="when sampling ahead: pushes do not wait for episodes to end; their tokens then have several versions",
    )
    truncated: Truncated = Field(
        default="keep", description="episodes that a limit cut off: keep them, with a reward of zero, or mask their loss"
    )

    @classmethod
    def fitted(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Lengths that are not given are at most the model's positions."""
        model = get(given, "train.hf_path") if has(given, "train.hf_path") else None
        positions = positions_of(model) if isinstance(model, str) and model else None
        if positions is None:
            return {}
        most = {_EPISODE_TOKENS: positions, "sampling.max_new_tokens": max(positions // 2, 1)}
        return {path: min(cls.preset[path], tokens) for path, tokens in most.items() if not has(given, path)}

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        name = type(self).__name__
        if (self.environment is None) == (self.player is None):
            problem = "give either an environment, which is stepped, or a player, which samples by itself"
            raise ConfigError.of(f"{name}.environment", self.environment, problem)
        if self.tool_format not in PARSERS:
            problem = (
                f"expected {', '.join(PARSERS)}; for another parser, also of vLLM, give a player: a SteppedPlayer whose "
                "StepOptions have the function as tool_format"
            )
            raise ConfigError.of(f"{name}.tool_format", self.tool_format, problem)
        for option in ("step_seconds", "tool_calls") if self.player is not None else ():
            if getattr(self.limits, option) is not None:
                problem = "a player has neither steps nor tools that the run knows of; leave it out"
                raise ConfigError.of(f"{name}.limits.{option}", getattr(self.limits, option), problem)
        if self.is_set("max_prompt_tokens"):
            problem = "environments make their prompts; set max_episode_tokens"
            raise ConfigError.of(f"{name}.max_prompt_tokens", self.max_prompt_tokens, problem)
        for option in DataConfig.model_fields:
            if option != "chat_template_kwargs" and self.data.is_set(option):
                problem = "an environment is given the row as it stands; leave it out"
                raise ConfigError.of(f"{name}.{option}", getattr(self.data, option), problem)
        if self.sampling.max_new_tokens >= self.limits.episode_tokens:
            problem = f"max_episode_tokens={self.limits.episode_tokens} must hold a prompt and a turn; use less"
            raise ConfigError.of(f"{name}.max_response_tokens", self.sampling.max_new_tokens, problem)
        if self.on_episode_failure == "drop" and self.least_episodes > self.sampling.n:
            problem = f"a group has samples_per_prompt={self.sampling.n} episodes; use at most that"
            raise ConfigError.of(f"{name}.least_episodes", self.least_episodes, problem)
        return self

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and turn of an episode."""
        return self.limits.episode_tokens

    @property
    def longest_sampled(self) -> int:
        return self.longest_sequence

    @property
    def task(self) -> str:
        """For people."""
        return f"environment {self.environment}" if self.environment else f"player {self.player}"

    def facts(self) -> list[str]:
        """For the first line that a run prints."""
        turns = "" if self.limits.turns is None else f" of up to {self.limits.turns} turns"
        return [
            f"{self.prompts_per_step} x {self.sampling.n} episodes{turns} a step",
            f"up to {self.longest_sequence} tokens",
            *super().facts()[2:],
        ]
