"""The interfaces of episodes of many turns, which users, engines and loops implement.

There are two levels. A :class:`Player` drives a :class:`Sampler` of tokens itself, as agents and other libraries do. An
:class:`Environment` is stepped: :class:`~rl_backend.environment.stepping.SteppedPlayer` plays it. The sampler keeps the
record of ids, from which the segments that are trained on are made, so nobody else handles masks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_backend.environment.episode import CallStatus as CallStatus
from rl_backend.environment.episode import Episode as Episode
from rl_backend.environment.episode import Finish as Finish
from rl_backend.environment.episode import Generation as Generation
from rl_backend.environment.episode import Message as Message
from rl_backend.environment.episode import Routes as Routes
from rl_backend.environment.episode import Segment as Segment
from rl_backend.environment.episode import Stop as Stop
from rl_backend.environment.episode import ToolCall as ToolCall
from rl_backend.environment.episode import Turn as Turn


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
        done: the episode ends.
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
        metrics: name -> number.
        stop: why it ended.
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

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        """
        Args:
            row: of the data set.
            sampler: of this episode alone.
        """
        ...


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
