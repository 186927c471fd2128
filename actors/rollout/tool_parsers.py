"""vLLM's parsers of tool calls, by the names that its server knows them by, without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rl_backend.contracts import ConfigError
from rl_backend.environment.tool_call_parsers import Attempt, CallParser, ParsedTurn

# Where parsers have the text that begins a call: they return no calls at all where one of several is broken, and a turn with
# that text is kept as an attempt that could not be read.
_MARKS = ("tool_call_start_token", "tool_calls_start_token", "bot_token")


def vllm_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> CallParser:
    """A parser for :class:`~rl_backend.environment.StepOptions`. Importing it takes seconds.

    Args:
        name: as of ``vllm serve --tool-call-parser``.
        tokenizer: of the model; some parsers want special tokens in it.
        tools: JSON schemas, which some parsers read types of arguments from.

    Raises:
        ConfigError: vLLM has no such parser, or it does not take this tokenizer.
    """
    # Imported here: it takes seconds, and only runs that name one of these parsers need it.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        made = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(sorted(ToolParserManager.list_registered()))
        raise ConfigError.of("tool_format", name, f"vLLM has no such parser; it has {known}") from None
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], model="model", tools=[dict(tool) for tool in tools] or None
    )
    try:
        made(tokenizer, request.tools)
    except Exception as error:  # parsers raise any type for a tokenizer without their tokens
        raise ConfigError.of("tool_format", name, f"does not take this model's tokenizer: {error}") from error

    def parse(text: str) -> ParsedTurn:
        # Parsers keep state of streams, so every turn has one of its own.
        parser = made(tokenizer, request.tools)
        found = parser.extract_tool_calls(text, request)
        if found.tools_called:
            calls = [_attempt(call.function.name, call.function.arguments) for call in found.tool_calls]
            return ParsedTurn(found.content or "", calls)
        marks = [mark for each in _MARKS if isinstance(mark := getattr(parser, each, None), str) and mark]
        if any(mark in text for mark in marks):
            return ParsedTurn("", [Attempt("", {}, "invalid_json", text, f"no call could be read, in the format {name}")])
        return ParsedTurn(text)

    return parse


def _attempt(name: str, arguments: str) -> Attempt:
    raw = f"{name}({arguments})"
    try:
        found = json.loads(arguments)
    except ValueError as error:
        return Attempt(name, {}, "invalid_json", raw, f"its arguments are not JSON: {error}")
    if not isinstance(found, dict):
        return Attempt(name, {}, "invalid_json", raw, "its arguments are not an object")
    return Attempt(name, found, "ok", raw)
