"""Tools: functions that a model may call, with schemas from their signatures, run in processes or threads."""

import asyncio
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rl_backend.contracts import ConfigError, EpisodeFailedError, RewardError, RolloutError
from rl_backend.data.rewards.function import load_callable
from rl_backend.data.rewards.worker import location_of
from rl_backend.data.rewards.worker_pool import EventLoop, Raised, TimeLimitError, WorkerPool
from rl_backend.environment.protocol import CallStatus, Message, Tool, ToolCall
from rl_backend.environment.tool_call_parsers import Attempt
from rl_backend.environment.user_code import Caller

type Where = Literal["processes", "threads"]
"""Where plain functions run: in processes of their own, which a limit of time ends and which share no memory, or in threads
of this one, if that is asked for."""


class ArgumentsError(Exception):
    """Arguments that do not fit a tool's schema."""


def tool_schema(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolFunction:
    """A plain, annotated function; another process finds it by ``spec``, as ``module:function`` or ``file.py:function``."""

    function: Callable[..., Any]
    spec: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def description(self) -> str:
        return re.split(r"\n\s*(?:Args|Returns|Raises):", inspect.getdoc(self.function) or "")[0].strip()

    @cached_property
    def arguments(self) -> type[BaseModel]:
        """The arguments, by the signature; descriptions from ``Args:`` in the docstring."""
        fields: dict[str, Any] = {}
        told = dict(
            re.findall(r"^[ \t]+(\w+)(?:[ \t]*\([^)]*\))?:[ \t]*(.+)$", inspect.getdoc(self.function) or "", re.MULTILINE)
        )
        for name, each in inspect.signature(self.function, eval_str=True).parameters.items():
            if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
                raise ConfigError.of(
                    "tools", self.spec, f"parameter {each} cannot be given by name; give it a name of its own"
                )
            kind = Any if each.annotation is each.empty else each.annotation
            default = ... if each.default is each.empty else each.default
            fields[name] = (kind, Field(default=default, description=told.get(name)))
        return create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)

    @property
    def parameters(self) -> dict[str, Any]:
        schema = self.arguments.model_json_schema()
        return {"type": "object", "properties": {}, **_without_titles(schema)}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the types that the function asks for; raises :class:`ArgumentsError`."""
        try:
            model = self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc'])) or self.name}: {each['msg']}" for each in error.errors())
            raise ArgumentsError("; ".join(problems)) from None
        return {name: getattr(model, name) for name in self.arguments.model_fields}


def tool_function(function: str | Callable[..., Any]) -> ToolFunction:
    """Finds a function by its name, or how a process can find one of a module."""
    if isinstance(function, str):
        made = ToolFunction(load_callable(function, field="tools"), function)
    else:
        module = sys.modules.get(function.__module__)
        location = None if module is None else location_of(module)
        spec = f"{location or function.__module__}:{function.__qualname__}"
        if location is None or getattr(module, function.__qualname__, None) is not function:
            problem = "a process cannot find it by this name; define it at the top of a module, or run tools in threads"
            raise ConfigError.of("tools", spec, problem)
        made = ToolFunction(function, spec)
    if inspect.iscoroutinefunction(made.function):
        raise ConfigError.of(
            "tools", made.spec, "is asynchronous; make it plain (def), or give your environment a Tool of its own"
        )
    made.arguments  # noqa: B018, a signature that cannot be used is refused now
    return made


class ToolPool:
    """Functions as tools, and the workers that call them. Close it when no episode is played any more.

    Args:
        functions: see :func:`tool_function`; in threads any plain function.
        workers: calls at once, of all episodes together.
        call_seconds: limit of a call; a process that is too slow is ended, a thread is left behind. None is endless.
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        *,
        where: Where = "processes",
        workers: int = 4,
        call_seconds: float | None = 30.0,
    ) -> None:
        found = [
            ToolFunction(each, getattr(each, "__qualname__", "tool"))
            if where == "threads" and not isinstance(each, str) and not inspect.iscoroutinefunction(each)
            else tool_function(each)
            for each in functions
        ]
        # A loop of its own, because the loops of batches of episodes come and go.
        self._loop = EventLoop()
        self._pool = WorkerPool(
            found,
            size=workers,
            processes=where == "processes",
            limit=call_seconds,
            calls="tools",
            option="where='processes'",
        )
        self.tools: tuple[Tool, ...] = tuple(
            PooledTool(each, index, self._pool, self._loop) for index, each in enumerate(found)
        )

    def close(self) -> None:
        self._loop.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class PooledTool:
    """A :class:`~rl_backend.environment.protocol.Tool` that a pool's workers call."""

    def __init__(self, function: ToolFunction, index: int, pool: WorkerPool, loop: EventLoop) -> None:
        self._function = function
        self._index = index
        self._pool = pool
        self._loop = loop
        self.name = function.name
        self.description = function.description
        self.parameters: Mapping[str, Any] = function.parameters

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        checked = self._function.checked(arguments)
        try:
            result = await asyncio.wrap_future(self._loop.run(self._pool.call(self._index, checked)))
        except RewardError as error:
            raise EpisodeFailedError(error.message) from error
        if isinstance(result, Raised):
            if result.error is not None:
                raise result.error
            raise RuntimeError(result.problem.removeprefix("raised "))
        return result if isinstance(result, str) else json.dumps(result, default=repr)


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key in ("title", "additionalProperties") and not isinstance(value, dict))
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema


async def run_calls(
    attempts: Sequence[Attempt], tools: Mapping[str, Tool], caller: Caller, *, most: int | None, seconds: float | None
) -> list[ToolCall]:
    """Calls tools one after the other, within ``seconds`` each; attempts beyond ``most`` are not run. None is no limit.

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
    # Nine letters and digits: Mistral's templates refuse other ids.
    return [f"call{first + index:05d}" for index in range(len(calls))]


def calling_message(content: str, calls: Sequence[ToolCall], ids: Sequence[str]) -> Message:
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
