"""Parts of an episode: generations, turns, tool calls, and the segments that are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Generation:
    """What an engine made of a prompt.

    Attributes:
        token_ids: with the stop token, where there was one.
        log_probs: of each token, by the weights that sampled it.
        finish: see :data:`Finish`.
        versions: of the weights, for each token.
        routes: of prompt and generation together but for the last token, which no forward pass has seen; None without.
        cached_tokens: of the prompt, which were not computed again.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish
    versions: Sequence[int]
    routes: Routes | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class ToolCall:
    """An attempt of the model to call a tool, whatever came of it.

    Attributes:
        name: as far as it could be read; empty where it could not.
        arguments: parsed; empty where they could not be.
        status: see :data:`CallStatus`.
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
        log_probs, finish, versions, routes: see :class:`Generation`.
        calls: every attempt to call a tool, in order.
        given: the messages that are new before this turn.
        reward: that the step after it gave.
        prompt_tokens: tokens before it.
        cached_tokens: those of them that the engine did not compute again.
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

    All but ``routes`` have L values, one for each token.

    Attributes:
        token_ids: prompt, turns and what came between them, never decoded and encoded again.
        sampled: whether the token was sampled and is trained.
        log_probs: of the sampled tokens as the engine gave them, 0 elsewhere.
        versions: of the weights that sampled it, -1 elsewhere.
        rewards: of a turn, at its last sampled token, 0 elsewhere.
        routes: of the first tokens, at most L - 1 rows, each from the forward pass that predicted the next token; None
            without.
    """

    token_ids: Sequence[int]
    sampled: Sequence[bool]
    log_probs: Sequence[float]
    versions: Sequence[int]
    rewards: Sequence[float]
    routes: Routes | None = None


@dataclass(frozen=True)
class Episode:
    """An episode that has ended.

    Attributes:
        segments: in order; none where it ended before its first turn. Rewards of their tokens add up to ``reward``.
        reward: of all steps, of the player and of the group's score.
        metrics: name -> number.
        turns: in order, for transcripts; their routes are in the segments alone.
        stop: see :data:`Stop`.
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
