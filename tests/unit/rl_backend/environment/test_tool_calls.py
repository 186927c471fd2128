"""Attempts to call tools: in order, within their number, as chat templates take them; and schemas of functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from rl_backend.contracts import ConfigError, EpisodeFailedError, RolloutError
from rl_backend.environment import Limits, ToolCall, ToolPool
from rl_backend.environment.tool_call_parsers import Attempt
from rl_backend.environment.tools import (
    ArgumentsError,
    ToolFunction,
    answer_messages,
    call_ids,
    calling_message,
    run_calls,
    tool_function,
    tool_schema,
)
from rl_backend.environment.user_code import Caller, task_name


class Noted:
    """A tool that notes its calls, and does what they ask for."""

    name, description = "note", "Notes."
    parameters: Mapping[str, Any] = {"type": "object"}

    def __init__(self) -> None:
        self.given: list[Mapping[str, Any]] = []

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        self.given.append(arguments)
        if "raises" in arguments:
            raise arguments["raises"]
        return arguments.get("answer", "noted")


def run(tool: Noted, *attempts: Attempt, most: int | None = None) -> list[ToolCall]:
    return asyncio.run(run_calls(attempts, {"note": tool, "b": tool}, Caller(), most=most, seconds=None))


@pytest.mark.parametrize(("most", "ran"), [(None, 3), (3, 3), (4, 3), (2, 2), (1, 1), (0, 0)])
def test_calls_beyond_those_that_are_left_are_not_run(most: int | None, ran: int) -> None:
    tool = Noted()
    calls = run(tool, *(Attempt("note", {"x": each}, raw=f"r{each}") for each in range(3)), most=most)
    assert [each.status for each in calls] == ["ok"] * ran + ["over_limit"] * (3 - ran)
    assert [each.answer for each in calls[ran:]] == ["Error: no more calls are allowed"] * (3 - ran)
    assert [dict(each) for each in tool.given] == [{"x": each} for each in range(ran)]
    assert [(each.name, each.arguments, each.raw) for each in calls] == [("note", {"x": n}, f"r{n}") for n in range(3)]


@pytest.mark.parametrize(
    ("raised", "status", "answer"),
    [
        (ArgumentsError("x: no"), "invalid_arguments", "Error: x: no"),
        (ValueError("odd"), "raised", "Error: ValueError: odd"),
        (SystemExit(3), "raised", "Error: RuntimeError: it ended its task by SystemExit: 3"),
    ],
)
def test_what_a_tool_raises_is_answered(raised: BaseException, status: str, answer: str) -> None:
    calls = run(Noted(), Attempt("note", {"raises": raised}), Attempt("note", {"answer": 7}))
    assert [(each.status, each.answer) for each in calls] == [(status, answer), ("ok", "7")]


@pytest.mark.parametrize("error", [ConfigError("c"), RolloutError("r"), EpisodeFailedError("e")])
def test_what_is_no_single_episodes_failure_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(Noted(), Attempt("note", {"raises": error}))


def test_a_call_that_could_not_be_read_and_an_unknown_tool_run_nothing() -> None:
    tool = Noted()
    calls = run(tool, Attempt("note", {"x": 1}, "unclosed", "raw", "it has no end"), Attempt("c"), Attempt("b", {"y": 1}))
    assert [(each.status, each.answer) for each in calls] == [
        ("unclosed", "Error: it has no end"),
        ("unknown_tool", "Error: there is no tool 'c'; there are b, note"),
        ("ok", "noted"),
    ]
    assert [dict(each) for each in tool.given] == [{"y": 1}]


def test_the_turn_and_its_answers_as_chat_templates_take_them() -> None:
    assert call_ids([], 3) == [] and calling_message("hm", [], []) == {"role": "assistant", "content": "hm"}
    calls = [ToolCall("f", {"x": 1}, "ok", "", "1"), ToolCall("", {}, "invalid_json", "{", "Error: odd")]
    ids = call_ids(calls, 99998)
    assert ids == ["call99998", "call99999"] and call_ids(calls, 0) == ["call00000", "call00001"]
    assert calling_message("hm", calls, ids) == {
        "role": "assistant",
        "content": "hm",
        "tool_calls": [
            {"id": "call99998", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"id": "call99999", "type": "function", "function": {"name": "unknown", "arguments": {}}},
        ],
    }
    assert answer_messages(calls, ids) == [
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "call99998"},
        {"role": "tool", "content": "Error: odd", "name": "unknown", "tool_call_id": "call99999"},
    ]


def search(words: list[str], title: str = "all", *, most: int | None = None, how: Literal["a", "b"] = "a") -> Any:
    """Looks for words.

    In all of the texts.

    Args:
        words (list): what to look for
        most: of them,
            at most
        how:    the way

    Returns:
        what: was found
    """
    return {"words": words, "title": title, "most": most, "how": how, "odd": {1}}


def plain(x: int, y) -> None: ...  # type: ignore[no-untyped-def]


def test_a_functions_schema_has_its_types_defaults_and_descriptions() -> None:
    found = tool_schema(ToolFunction(search, "s:search"))["function"]  # type: ignore[arg-type]
    assert found["name"] == "search" and found["description"] == "Looks for words.\n\nIn all of the texts."
    fields = found["parameters"]["properties"]
    assert found["parameters"]["required"] == ["words"] and found["parameters"]["type"] == "object"
    assert fields["words"] == {"type": "array", "items": {"type": "string"}, "description": "what to look for"}
    assert fields["title"] == {"type": "string", "default": "all"}, "a field of the name title is one"
    assert fields["how"] == {"type": "string", "enum": ["a", "b"], "default": "a", "description": "the way"}
    assert fields["most"]["default"] is None and "additionalProperties" not in found["parameters"]
    other = ToolFunction(plain, "s:plain")
    assert other.description == "" and other.parameters["properties"] == {"x": {"type": "integer"}, "y": {}}
    assert other.parameters["required"] == ["x", "y"]


def test_arguments_are_checked_and_become_what_the_function_asks_for() -> None:
    tool = ToolFunction(search, "s:search")
    given = {"words": ["a"], "most": "3"}
    assert tool.checked(given) == {"words": ["a"], "title": "all", "most": 3, "how": "a"} and given["most"] == "3"
    with pytest.raises(ArgumentsError) as refused:
        tool.checked({"words": ["a", 2], "how": "c", "more": 1})
    assert str(refused.value).split("; ") == [
        "words.1: Input should be a valid string",
        "how: Input should be 'a' or 'b'",
        "more: Extra inputs are not permitted",
    ]
    with pytest.raises(ArgumentsError, match=r"^words: Field required$"):
        tool.checked({})


@pytest.mark.parametrize("function", [lambda *x: 0, lambda **x: 0, eval("lambda x, /: 0")], ids=["*x", "**x", "positional"])
def test_parameters_without_a_name_of_their_own_are_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"tools='mine': parameter \*{0,2}x cannot be given by name; give it a name"):
        _ = ToolFunction(function, "mine").arguments


def test_functions_of_a_module_are_found_again_by_their_name() -> None:
    made = tool_function(search)
    assert made.function is search and made.spec == f"{__name__}:search" and made.name == "search"
    assert tool_function(f"{__name__}:search").function is search
    with pytest.raises(ConfigError, match="is asynchronous; make it plain"):
        tool_function(waits)
    with pytest.raises(ConfigError, match="is asynchronous; make it plain"):
        ToolPool([waits], where="threads")


async def waits() -> None: ...


def test_answers_of_a_pool_are_text_or_json_of_its_own_tool() -> None:
    def shout(word: str) -> str:
        return word.upper()

    def fails() -> None:
        raise KeyError("row")

    async def all_of_them() -> list[Any]:
        first, second, third = pool.tools
        asked = (first({"words": ["é"]}), second({"word": "a"}), third({}))
        return list(await asyncio.gather(*asked, return_exceptions=True))

    with ToolPool([search, shout, fails], where="threads", workers=3) as pool:
        assert [tool.name for tool in pool.tools] == ["search", "shout", "fails"]
        assert [tool.parameters.get("required", []) for tool in pool.tools] == [["words"], ["word"], []]
        found, shouted, raised = asyncio.run(all_of_them())
        with pytest.raises(ArgumentsError):
            asyncio.run(pool.tools[1]({}))
    assert json.loads(found) == {"words": ["é"], "title": "all", "most": None, "how": "a", "odd": "{1}"}
    assert shouted == "A" and isinstance(raised, KeyError)


class Named:
    def method(self) -> None: ...
    @classmethod
    def made(cls) -> None: ...
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Named().method, "Named.method"),
        (Named.made, "Named.made"),
        (Named(), "Named"),
        (Named, "Named"),
        (Noted.__call__, "Noted.__call__"),
    ],
)
def test_tasks_are_named_by_what_they_run(function: Any, name: str) -> None:
    assert task_name(function) == name


@pytest.mark.parametrize("field", sorted(Limits.model_fields))
def test_a_limit_of_nothing_is_refused_and_none_is_endless(field: str) -> None:
    least = {"episode_tokens": 2}.get(field, 1)
    assert getattr(Limits(), field) is None and getattr(Limits.model_validate({field: least}), field) == least
    for value in (0, -1, *([1] if field == "episode_tokens" else [])):
        with pytest.raises(ConfigError, match=f"Limits.{field}"):
            Limits.model_validate({field: value})
    if "seconds" in field:
        for text in ("inf", "nan"):
            with pytest.raises(ConfigError, match=f"Limits.{field}"):
                Limits.model_validate({field: float(text)})
