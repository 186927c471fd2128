"""Attempts to call tools: each is run or not, and answered to the model either way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from copy import deepcopy

from rl_backend.contracts import ConfigError, EpisodeFailedError, RolloutError
from rl_backend.data.rewards.pool import TimeLimitError
from rl_backend.environment.calling import Caller
from rl_backend.environment.episode import CallStatus, Message, ToolCall
from rl_backend.environment.parsers import Attempt
from rl_backend.environment.protocol import Tool
from rl_backend.environment.tools import ArgumentsError


async def run_calls(
    attempts: Sequence[Attempt], tools: Mapping[str, Tool], caller: Caller, *, most: int | None, seconds: float | None
) -> list[ToolCall]:
    """Calls tools one after the other.

    Args:
        attempts: as they were written.
        tools: by name.
        most: calls that are still allowed; None for any number. The attempts beyond are not run.
        seconds: limit of a call; None is endless.

    Raises:
        ConfigError, RolloutError, EpisodeFailedError: what is no single episode's failure. Anything else that a tool raises
            is told to the model.
    """
    calls = []
    for index, attempt in enumerate(attempts):
        if most is not None and index >= most:
            calls.append(_call(attempt, "over_limit", "no more calls are allowed"))
        else:
            calls.append(await _run(attempt, tools, caller, seconds))
    return calls


def call_ids(calls: Sequence[ToolCall], first: int) -> list[str]:
    """An id for each call: nine letters and digits, because Mistral's templates refuse others."""
    return [f"call{first + index:05d}" for index in range(len(calls))]


def calling_message(content: str, calls: Sequence[ToolCall], ids: Sequence[str]) -> Message:
    """The model's turn as chat templates take it."""
    if not calls:
        return {"role": "assistant", "content": content}
    written = [
        {"id": call_id, "type": "function", "function": {"name": call.name or "unknown", "arguments": dict(call.arguments)}}
        for call, call_id in zip(calls, ids, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def answer_messages(calls: Sequence[ToolCall], ids: Sequence[str]) -> list[Message]:
    return [
        {"role": "tool", "content": call.answer, "name": call.name or "unknown", "tool_call_id": call_id}
        for call, call_id in zip(calls, ids, strict=True)
    ]


async def _run(attempt: Attempt, tools: Mapping[str, Tool], caller: Caller, seconds: float | None) -> ToolCall:
    if attempt.status != "ok":
        return _call(attempt, attempt.status, attempt.problem)
    tool = tools.get(attempt.name)
    if tool is None:
        return _call(attempt, "unknown_tool", f"there is no tool {attempt.name!r}; there are {', '.join(sorted(tools))}")
    try:
        # A copy: what the model wrote is rendered and recorded after the tool has had it.
        answer = await caller(tool.__call__, deepcopy(attempt.arguments), seconds=seconds)
    except TimeLimitError:
        return _call(attempt, "timeout", "the tool took too long")
    except ArgumentsError as error:
        return _call(attempt, "invalid_arguments", str(error))
    except (ConfigError, RolloutError, EpisodeFailedError, asyncio.CancelledError):
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001, a tool may raise anything, and the model is told
        return _call(attempt, "raised", f"{type(error).__name__}: {error}")
    return ToolCall(attempt.name, attempt.arguments, "ok", attempt.raw, str(answer))


def _call(attempt: Attempt, status: CallStatus, problem: str) -> ToolCall:
    return ToolCall(attempt.name, attempt.arguments, status, attempt.raw, f"Error: {problem}")
