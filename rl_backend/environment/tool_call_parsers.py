"""Parsers of tool calls in what a model wrote: every attempt is kept, readable or not."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_backend.contracts import ConfigError
from rl_backend.environment.protocol import CallStatus

_OPEN, _SHUT = "<tool_call>", "</tool_call>"
_BEGINS_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(")
_TOO_LONG = 80


@dataclass(frozen=True)
class Attempt:
    """A call as it was written: what of it can be read, and what is wrong, for the model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: CallStatus = "ok"
    raw: str = ""
    problem: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """The text that a model wrote without the calls, and these in order."""

    content: str
    attempts: Sequence[Attempt] = ()


class CallParser(Protocol):
    def __call__(self, text: str) -> ParsedTurn: ...


def parse_hermes(text: str) -> ParsedTurn:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number, with text around: Hermes, Qwen."""
    thought, spoken = _split_thinking(text)
    before, *parts = spoken.split(_OPEN)
    content, attempts = [thought + before], []
    for part in parts:
        body, shut, after = part.partition(_SHUT)
        raw = f"{_OPEN}{body}{shut}"
        if shut:
            attempts.append(_read_json(body, raw))
            content.append(after)
        else:
            attempts.append(Attempt(_name_in(body), {}, "unclosed", raw, f"the call has no {_SHUT}"))
    return ParsedTurn("".join(content).strip(), attempts)


def parse_json(text: str) -> ParsedTurn:
    """A turn that is a JSON object ``{"name": ..., "arguments" or "parameters": {...}}`` or a list of them: Llama 3."""
    thought, spoken = _split_thinking(text)
    body = spoken.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith(("{", "[")):
        return ParsedTurn(text.strip())
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        if '"name"' not in body:
            return ParsedTurn(text.strip())
        status: CallStatus = "invalid_json" if body.endswith(("}", "]")) else "unclosed"
        return ParsedTurn(thought.strip(), [Attempt(_name_in(body), {}, status, body, f"it is not JSON: {error}")])
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        return ParsedTurn(text.strip())
    return ParsedTurn(thought.strip(), [_checked(call, json.dumps(call)) for call in calls])


def parse_pythonic(text: str) -> ParsedTurn:
    """A turn that is a list of calls, ``[add(x=1, y=2), now()]``, with constants that JSON has: Llama 4, LFM2."""
    thought, spoken = _split_thinking(text)
    body = spoken.strip()
    for mark in ("<|tool_call_start|>", "<|python_start|>"):
        body = body.removeprefix(mark)
    for mark in ("<|tool_call_end|>", "<|python_end|>"):
        body = body.removesuffix(mark)
    if not _BEGINS_PYTHONIC.match(body):
        return ParsedTurn(text.strip())
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        status: CallStatus = "invalid_json" if body.endswith("]") else "unclosed"
        return ParsedTurn(
            thought.strip(), [Attempt(_name_in(body), {}, status, body, f"it is not a list of calls: {error}")]
        )
    if not isinstance(tree, ast.List):
        attempt = Attempt(_name_in(body), {}, "invalid_json", body, "it is not one list of calls: write nothing around it")
        return ParsedTurn(thought.strip(), [attempt])
    return ParsedTurn(thought.strip(), [_read_call(each, body) for each in tree.elts])


def no_calls(text: str) -> ParsedTurn:
    return ParsedTurn(text)


PARSERS: Mapping[str, CallParser] = {"hermes": parse_hermes, "json": parse_json, "pythonic": parse_pythonic}


def call_parser(name: str) -> CallParser:
    if name not in PARSERS:
        raise ConfigError.of(
            "tool_format",
            name,
            f"expected {', '.join(PARSERS)}; for a parser of vLLM take actors.rollout.tool_parsers.vllm_parser, for one of "
            "your own give the function",
        )
    return PARSERS[name]


def _split_thinking(text: str) -> tuple[str, str]:
    """What was thought, and what was said. Calls that are only thought about are none."""
    # The opening tag may be in the prompt, as of templates that begin the thinking themselves.
    thought, closed, said = text.rpartition("</think>")
    if closed:
        return thought + closed, said
    before, opened, _ = text.partition("<think>")
    return (text[len(before) :], before) if opened else ("", text)


def _read_json(body: str, raw: str) -> Attempt:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Attempt(_name_in(body), {}, "invalid_json", raw, f"it is not JSON: {error}")
    return _checked(found, raw)


def _checked(found: Any, raw: str) -> Attempt:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Attempt("", {}, "invalid_json", raw, 'expected {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Attempt(found["name"], {}, "invalid_json", raw, f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return Attempt(found["name"], {}, "invalid_json", raw, "its arguments are not an object")
    return Attempt(found["name"], arguments, "ok", raw)


def _read_call(node: ast.expr, body: str) -> Attempt:
    raw = ast.get_source_segment(body, node) or body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return Attempt("", {}, "invalid_json", raw, "expected name(argument=value, ...)")
    try:
        name = ast.unparse(node.func)
    except RecursionError:
        return Attempt("", {}, "invalid_json", raw, "the name is too long")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Attempt(name, {}, "invalid_arguments", raw, "give every argument by its name")
    try:
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Attempt(name, {}, "invalid_arguments", raw, "a value is no constant")
    try:
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        return Attempt(name, {}, "invalid_arguments", raw, "a value is none that JSON has")
    return Attempt(name, arguments, "ok", raw)


def _name_in(body: str) -> str:
    found = re.search(r'"name"\s*:\s*"([^"]*)"', body) or re.match(r"\s*\[?\s*([A-Za-z_]\w*)\s*\(", body)
    return found[1][:_TOO_LONG] if found else ""
