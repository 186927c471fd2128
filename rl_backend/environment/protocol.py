"""Interfaces and values of episodes of many turns, which users, engines and loops implement; found by name.

There are two levels. A :class:`Player` drives a :class:`Sampler` of tokens itself, as agents and other libraries do. An
:class:`Environment` is stepped: :class:`~rl_backend.environment.stepping.SteppedPlayer` plays it. The sampler keeps the
record of ids, from which the segments that are trained on are made, so nobody else handles masks.
"""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rl_backend.contracts import BaseConfig, ConfigError, SamplingMask
from rl_backend.data.rewards.function import load_callable

type Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, and what else the chat template reads."""

type Routes = NDArray[np.integer[Any]]
"""(rows, MoE layers, top_k): the experts of consecutive tokens, as ``Routes.experts`` of a sample has them."""

type Finish = Literal["stop", "length", "abort"]
"""Why a turn ended: a stop token, which is its last id; its limit of tokens; or the engine gave it up."""

type Stop = Literal[
    "done", "turns", "tokens", "context", "length", "parse", "tool_calls", "timeout", "error", "cancelled"
]  # fmt: skip
"""Why an episode ended: the environment or player said so; a limit of turns, of tokens or of the context; a turn that was
cut by length or could not be parsed, where that ends it; the limit of tool calls or of time; an error; or a cancellation."""

type CallStatus = Literal[
    "ok", "unknown_tool", "invalid_json", "invalid_arguments", "unclosed", "raised", "timeout", "over_limit"
]  # fmt: skip
"""What came of an attempt to call a tool. Every status but ``ok`` is answered to the model with what was wrong."""


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


@dataclass(frozen=True)
class Generation:
    """What an engine made of a prompt.

    Attributes:
        token_ids: with the stop token, where there was one.
        log_probs: of each token, by the weights that sampled it.
        versions: of the weights, for each token.
        routes: of prompt and generation together but for the last token, which no forward pass has seen; None without.
        cached_tokens: of the prompt, which were not computed again.
        sampling_mask: of the generated tokens; None without.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish
    versions: Sequence[int]
    routes: Routes | None = None
    cached_tokens: int = 0
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True)
class ToolCall:
    """An attempt of the model to call a tool, whatever came of it.

    Attributes:
        name, arguments: as far as they could be read; else empty.
        raw: the text that the call was read from.
        answer: what the model is told: the tool's result, or what was wrong.
    """

    name: str
    arguments: Mapping[str, Any]
    status: CallStatus
    raw: str
    answer: str = ""


@dataclass(frozen=True)
class Turn:
    """One generation of the model within an episode.

    Attributes:
        message: as the chat template takes it; None where tokens are not parsed (a player of ids).
        token_ids: exactly as sampled, with the stop token, where there was one.
        calls: every attempt to call a tool, in order.
        given: the messages that are new before this turn.
        reward: that the step after it gave.
        prompt_tokens: tokens before it, of which the engine did not compute ``cached_tokens`` again.
        trained: whether its tokens are; False where the environment left it out.
    """

    message: Message | None
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish
    calls: Sequence[ToolCall] = ()
    versions: Sequence[int] = ()
    routes: Routes | None = None
    given: Sequence[Message] = ()
    reward: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    trained: bool = True


@dataclass(frozen=True)
class Segment:
    """A sequence to train on: all turns of an episode whose prompts begin with what came before. It ends with a turn.

    All but ``routes`` have L values, or rows, one for each token.

    Attributes:
        token_ids: prompt, turns and what came between them, never decoded and encoded again.
        sampled: whether the token was sampled and is trained.
        log_probs: of the sampled tokens as the engine gave them, 0 elsewhere.
        versions: of the weights that sampled it, -1 elsewhere.
        rewards: of a turn, at its last sampled token, 0 elsewhere.
        routes: of the first tokens, at most L - 1 rows, each from the forward pass that predicted the next token; None
            without.
        sampling_mask: of all tokens, -1 alone where no engine sampled one; None without.
    """

    token_ids: Sequence[int]
    sampled: Sequence[bool]
    log_probs: Sequence[float]
    versions: Sequence[int]
    rewards: Sequence[float]
    routes: Routes | None = None
    sampling_mask: SamplingMask | None = None


@dataclass(frozen=True)
class Episode:
    """An episode that has ended.

    Attributes:
        segments: in order; none where it ended before its first turn. Rewards of their tokens add up to ``reward``.
        reward: of all steps, of the player and of the group's score.
        turns: in order, for transcripts; their routes are in the segments alone.
        error: what went wrong, with ``stop="error"`` or ``"timeout"``; or the limit that was met. Else empty.
        seed: of its sampling: its first turn's, from which those of the others follow.
    """

    segments: Sequence[Segment]
    reward: float
    metrics: Mapping[str, float]
    turns: Sequence[Turn]
    stop: Stop
    error: str = ""
    seed: int = 0


class TokenSource(Protocol):
    """Engines, seen from an episode: a prompt of ids in, a generation out, many at once."""

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and generation together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    async def generate(
        self, token_ids: Sequence[int], *, seed: int, stop_token_ids: Sequence[int], max_tokens: int
    ) -> Generation:
        """Continues a prompt. Cancelling the call gives the generation up.

        Args:
            token_ids: 1 to ``context_tokens - max_tokens`` of them, checked by the caller.
            seed: decides the result together with prompt and weights, whoever else is being served.
            stop_token_ids: ids that end the generation and are its last token.
            max_tokens: at least 1.
        """
        ...


type Prompt = Sequence[Message] | Sequence[int]
"""Messages, or ids as they stand."""


@dataclass(frozen=True)
class Step:
    """What an environment answers to a turn.

    Attributes:
        messages: new ones, such as answers of tools or the next question; ignored once ``done``.
        token_ids: in their place, for environments of ids: the whole next prompt.
        reward: of the turn.
        metrics: name -> number; those of several steps of an episode are added up.
        restart: in place of ``messages``, a history that begins anew; the record branches.
        trained: False leaves the turn out of training, such as one that could not be parsed.
        stop: why it ends, where ``done``.
    """

    messages: Sequence[Message] = ()
    token_ids: Sequence[int] | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    restart: Sequence[Message] | None = None
    trained: bool = True
    stop: Stop = "done"


@dataclass(frozen=True)
class Result:
    """What a player says of its episode.

    Attributes:
        reward: of the episode as a whole, at its last sampled token, beside what :meth:`Sampler.reward` gave to turns.
        error: for ``stop="error"``: what went wrong.
    """

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    stop: Stop = "done"
    error: str = ""


class Sampler(Protocol):
    """Tokens in, tokens out, for one episode: enforces its limits and keeps its record."""

    @property
    def seed(self) -> int:
        """For whatever the environment draws: episodes of a group share it, so that they have the same task."""
        ...

    async def sample(
        self, token_ids: Sequence[int], *, stop_token_ids: Sequence[int] = (), max_tokens: int | None = None
    ) -> Turn:
        """Samples a turn.

        Args:
            token_ids: the whole prompt. If it begins with all ids of a segment it extends that one, else it begins another.
            stop_token_ids: end the turn and are its last token.
            max_tokens: of the turn; None for as many as the limits leave.

        Raises:
            EpisodeEndError: a limit is met, or the prompt leaves no room in the context. Asked again it raises it again;
                let it pass.
            BatchError: no ids, or an id outside the vocabulary.
        """
        ...

    def reward(self, value: float) -> None:
        """Adds to the reward of the last turn."""
        ...

    def leave_out(self) -> None:
        """Takes the last turn out of training."""
        ...

    def describe(self, message: Message | None, calls: Sequence[ToolCall] = (), given: Sequence[Message] = ()) -> None:
        """Adds to the last turn what transcripts show of it; nothing here reaches the record of ids."""
        ...


class Player(Protocol):
    """Plays an episode by a loop of its own; raising anything ends this episode alone."""

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result: ...


class Tool(Protocol):
    """What a model may call."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON schema of the arguments, an object."""
        ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """The answer; raises whatever is wrong with the arguments, which the model is told."""
        ...


class Environment(Protocol):
    """One episode, used once. Each method may be plain or asynchronous; plain ones run in a thread.

    A class that derives from this one may leave out ``tools`` and ``close``.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """What the model may call; their calls are run and answered before :meth:`step` is asked."""
        return ()

    def start(self) -> Prompt | Awaitable[Prompt]:
        """The first prompt."""
        ...

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """Answers a turn."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Called once, whatever happened, cancellation too."""
        return None


class MakeEnvironment(Protocol):
    """Makes the environment of an episode; found by name, ``package.module:name`` or ``path/file.py:name``."""

    def __call__(self, row: Mapping[str, Any], seed: int) -> Environment:
        """
        Args:
            row: of the data set.
            seed: for whatever the environment draws; episodes of a group share it.
        """
        ...


class Score(Protocol):
    """Rewards that need all episodes of a group; plain or asynchronous. They are added to those of the episodes."""

    def __call__(self, episodes: Sequence[Episode]) -> Sequence[float] | Awaitable[Sequence[float]]: ...


def load_environment(spec: str, *, field: str = "environment") -> MakeEnvironment:
    """What makes the environment of an episode, by its name: ``package.module:name`` or ``path/file.py:name``.

    Raises:
        ConfigError: there is none, or it cannot be called with ``(row, seed)``. ``field`` is the option that names it.
    """
    return cast(MakeEnvironment, _load(spec, field, "row, seed", {}, 0))


def load_player(spec: str, *, field: str = "player") -> Player:
    """A function, or an object, that plays an episode; arguments and errors as of :func:`load_environment`."""
    return cast(Player, _load(spec, field, "row, sampler", {}, None))


def load_score(spec: str, *, field: str = "score") -> Score:
    """A function that scores the episodes of a group; arguments and errors as of :func:`load_environment`."""
    return cast(Score, _load(spec, field, "episodes", ()))


def _load(spec: str, field: str, takes: str, *arguments: Any) -> Any:
    found = load_callable(spec, field=field)
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError.of(field, spec, f"must take ({takes}): {error}") from None
    return found
