"""The player of environments that are stepped: renders, samples, parses, calls tools, asks for the next step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rl_backend.contracts import BatchError, ConfigError, EpisodeEndError
from rl_backend.data.chat_template import tool_name
from rl_backend.data.examples import json_objects
from rl_backend.data.rewards.worker import what_it_raised
from rl_backend.data.rewards.worker_pool import TimeLimitError
from rl_backend.environment.conversation import ChatFormat, Conversation, OtherEnd, chat_format, id_format
from rl_backend.environment.playing import ended_by
from rl_backend.environment.protocol import (
    Environment,
    Limits,
    MakeEnvironment,
    Message,
    Prompt,
    Result,
    Sampler,
    Step,
    Tool,
    Turn,
)
from rl_backend.environment.rendering import ChatRenderer, History
from rl_backend.environment.tool_call_parsers import CallParser, call_parser, no_calls
from rl_backend.environment.tools import answer_messages, call_ids, calling_message, run_calls, tool_schema
from rl_backend.environment.user_code import Caller, close_late

CLOSING_SECONDS = 5.0
"""For ``close``, where ``limits.step_seconds`` is not set."""


@dataclass(frozen=True)
class StepOptions:
    """How environments are played.

    Attributes:
        history: needed where the template would change the past.
        stop_token_ids: beside those of tokenizer and template.
        tool_format: of the calls that the model writes: a name, or a parser of your own.
        on_cut: of a turn that is cut by its limit of tokens: ``continue`` steps as after any turn, ``end`` ends the episode
            after the environment has been asked for its reward.
    """

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    history: History | None = None
    other_end: OtherEnd = "replace"
    stop_token_ids: Sequence[int] = ()
    tool_format: str | CallParser = "hermes"
    on_cut: Literal["continue", "end"] = "continue"
    limits: Limits = field(default_factory=Limits)


class SteppedPlayer:
    """A :class:`~rl_backend.environment.protocol.Player` of environments."""

    def __init__(self, make: MakeEnvironment, tokenizer: Any, options: StepOptions | None = None) -> None:
        self.options = options or StepOptions()
        self._make = make
        self._renderer = ChatRenderer(tokenizer, dict(self.options.chat_template_kwargs))
        self._formats: dict[str, ChatFormat] = {}
        self._caller = Caller()
        form = self.options.tool_format
        self._parser = call_parser(form) if isinstance(form, str) else form

    def ending_with(self, stop_token_ids: Sequence[int]) -> SteppedPlayer:
        """A player of the same environments, whose turns end with these, beside those of tokenizer and template."""
        return SteppedPlayer(self._make, self._renderer.tokenizer, replace(self.options, stop_token_ids=stop_token_ids))

    async def check(self, row: Mapping[str, Any], seed: int = 0) -> ChatFormat:
        """Makes an environment, asks for its tools and checks the model's chat template with them, when a run starts."""
        environment = await self._made(row, seed)
        try:
            return self.format(_tools(environment, row))
        finally:
            await self._close(environment)

    def format(self, tools: Sequence[Tool]) -> ChatFormat:
        schemas = [tool_schema(tool) for tool in tools]
        key = json.dumps(schemas, sort_keys=True, default=str)
        if key not in self._formats:
            self._formats[key] = chat_format(
                self._renderer.with_tools(schemas),
                history=self.options.history,
                other_end=self.options.other_end,
                stop_token_ids=self.options.stop_token_ids,
            )
        return self._formats[key]

    async def __call__(self, row: Mapping[str, Any], sampler: Sampler) -> Result:
        environment = await self._made(row, sampler.seed)
        problem = ""
        try:
            result = await self._play(environment, row, sampler)
        finally:
            problem = await self._close(environment)
        return replace(result, error=problem) if problem else result

    async def _made(self, row: Mapping[str, Any], seed: int) -> Any:
        # Where its episode has been ended meanwhile, nobody else would close it.
        return await self._caller(self._make, row, seed, seconds=self.options.limits.step_seconds, on_late=close_late)

    async def _play(self, environment: Environment, row: Mapping[str, Any], sampler: Sampler) -> Result:
        tools = _tools(environment, row)
        by_ids = id_format(self._renderer, self.options.stop_token_ids)
        episode = _Played(Conversation(by_ids), {tool.name: tool for tool in tools}, lambda: self.format(tools))
        try:
            return await self._steps(environment, sampler, episode)
        except (EpisodeEndError, TimeLimitError) as end:
            return ended_by(end, episode.metrics)

    async def _steps(self, environment: Environment, sampler: Sampler, episode: _Played) -> Result:
        seconds = self.options.limits.step_seconds
        prompt = episode.start(await self._caller(environment.start, seconds=seconds))
        while True:
            turn = await sampler.sample(prompt, stop_token_ids=episode.conversation.format.stop_token_ids)
            turn = await self._completed(turn, episode)
            sampler.describe(turn.message, turn.calls, turn.given)
            step = await self._caller(environment.step, turn, seconds=seconds)
            if not isinstance(step, Step):
                raise BatchError(f"step returned {type(step).__name__}; expected a Step")
            sampler.reward(step.reward)
            if not step.trained:
                sampler.leave_out()
            episode.add_metrics(step.metrics)
            if step.done:
                return Result(metrics=episode.metrics, stop=step.stop)
            if any(call.status == "over_limit" for call in turn.calls):
                return Result(metrics=episode.metrics, stop="tool_calls", error=f"limits.tool_calls={self._most_calls}")
            if turn.finish == "length" and self.options.on_cut == "end":
                return Result(metrics=episode.metrics, stop="length", error="a turn was cut by its limit of tokens")
            prompt = episode.go_on(step, turn)

    @property
    def _most_calls(self) -> int | None:
        return self.options.limits.tool_calls

    async def _completed(self, turn: Turn, episode: _Played) -> Turn:
        text = episode.conversation.add_turn(turn.token_ids, turn.finish)
        parsed = (self._parser if episode.tools else no_calls)(text)
        left = None if self._most_calls is None else max(0, self._most_calls - episode.calls)
        seconds = self.options.limits.step_seconds
        calls = await run_calls(parsed.attempts, episode.tools, self._caller, most=left, seconds=seconds)
        return episode.answered(turn, parsed.content, calls)

    async def _close(self, environment: Environment) -> str:
        """Closes, even while the episode is being cancelled; returns what went wrong."""
        seconds = self.options.limits.step_seconds or CLOSING_SECONDS
        close = getattr(environment, "close", None)
        if close is None:
            return ""
        closing = asyncio.ensure_future(self._caller(close, seconds=seconds, frees=True))
        cancelled = None
        # Shielded: what an environment holds, such as a container, must be freed even while its run is interrupted.
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
            except BaseException:  # noqa: BLE001, told below
                break
        if cancelled is not None:
            closing.exception()
            raise cancelled
        raised = closing.exception()
        return "" if raised is None else f"close failed: {what_it_raised(raised)}"


class _Played:
    def __init__(self, conversation: Conversation, tools: Mapping[str, Tool], chat: Callable[[], ChatFormat]) -> None:
        self.conversation = conversation
        self.tools = tools
        self._chat = chat
        self.metrics: dict[str, float] = {}
        self.calls = 0
        self._given: Sequence[Message] = ()
        self._ids: list[str] = []

    def start(self, prompt: Prompt) -> list[int]:
        messages = [each for each in prompt if isinstance(each, Mapping)]
        if len(messages) == len(prompt) > 0:
            self._given = messages
            # Asked for only now: episodes of ids need no chat template.
            self.conversation.format = self._chat()
            return self.conversation.start(messages)
        if not all(isinstance(each, int) for each in prompt) or not prompt:
            raise BatchError(f"start returned {prompt!r:.200}; expected messages, or token ids, at least one")
        return self.conversation.start_with_ids([each for each in prompt if isinstance(each, int)])

    def answered(self, turn: Turn, content: str, calls: Sequence[Any]) -> Turn:
        self._ids = call_ids(calls, self.calls)
        self.calls += len(calls)
        return replace(turn, message=calling_message(content, calls, self._ids), calls=tuple(calls), given=self._given)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)

    def go_on(self, step: Step, turn: Turn) -> list[int]:
        given = [name for name in ("messages", "token_ids", "restart") if getattr(step, name)]
        answers = answer_messages(turn.calls, self._ids)
        if len(given) > 1 or not (given or answers):
            problem = f"step returned {' and '.join(given) or 'nothing to go on with'}"
            raise BatchError(f"{problem}; give one of messages, token_ids and restart, or done=True")
        if step.token_ids is not None:
            self._given = ()
            return self.conversation.start_with_ids(step.token_ids)
        if step.restart is not None:
            self._given = step.restart
            self.conversation.format = self._chat()
            return self.conversation.start(step.restart)
        self._given = [*answers, *step.messages]
        self.conversation.format = self._chat()
        return self.conversation.go_on(self._given, turn.message if answers else None)


def _tools(environment: Environment, row: Mapping[str, Any]) -> Sequence[Tool]:
    tools = tuple(getattr(environment, "tools", ()))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ConfigError.of("tools", names, "two have the same name")
    if tools:
        require_given(row.get("tools"), names)
    return tools


def require_given(tools: Any, given: Sequence[str]) -> None:
    """Raises :class:`BatchError` for a row's ``tools`` with schemas of functions other than the environment's, ``given``."""
    try:
        names = [tool_name(tool) for tool in json_objects(tools, "", "")]
    except BatchError:  # a column without schemas is the environment's own business
        return
    if missing := [name for name in names if name not in given]:
        raise BatchError(
            f"field tools: the row has {', '.join(missing)}, and the environment gives {', '.join(given) or 'no tools'}; "
            "the model is told of the environment's tools alone: give them there, or rename the column"
        )
