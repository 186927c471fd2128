from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.environment.parsers import PARSERS, call_parser

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'


def found(form: str, text: str) -> list[tuple[str, dict[str, object], str]]:
    return [(each.name, dict(each.arguments), each.status) for each in call_parser(form)(text).attempts]


@pytest.mark.shows("environments: every attempt to call a tool is kept, with why it could not be read")
@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", CALL, [("add", {"x": 2}, "ok")]),
        ("hermes", f"I add.\n{CALL}\n{CALL}", [("add", {"x": 2}, "ok")] * 2),
        ("hermes", f"{CALL}<tool_call>{{broken</tool_call>", [("add", {"x": 2}, "ok"), ("", {}, "invalid_json")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": 2}}', [("add", {}, "unclosed")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": [2]}</tool_call>', [("add", {}, "invalid_json")]),
        ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', [("a", {"x": 1}, "ok")]),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', [("", {}, "invalid_json")]),
        ("hermes", f"<think>{CALL}</think>no", []),
        ("hermes", f"<think>hm</think>{CALL}", [("add", {"x": 2}, "ok")]),
        ("hermes", f"<think>{CALL}", []),
        ("hermes", "It is 4.", []),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", [("", {}, "invalid_json")]),
        ("json", '{"name": "add", "parameters": {"x": 2}}', [("add", {"x": 2}, "ok")]),
        ("json", '[{"name": "a", "arguments": {}}, {"name": "b"}]', [("a", {}, "ok"), ("b", {}, "ok")]),
        ("json", '{"name": "add", "parameters": {"x": 2', [("add", {}, "unclosed")]),
        ("json", '{"name": "add", parameters: {"x": 2}}', [("add", {}, "invalid_json")]),
        ("json", '{"answer": 4}', []),
        ("json", "[1, 2]", []),
        ("json", "It is {4}.", []),
        ("json", '<|python_tag|>{"name": "add", "parameters": {"x": 2}}', [("add", {"x": 2}, "ok")]),
        ("pythonic", '[add(x=2, y="b"), now()]', [("add", {"x": 2, "y": "b"}, "ok"), ("now", {}, "ok")]),
        ("pythonic", "<|tool_call_start|>[f(x=[1, {'a': None}])]<|tool_call_end|>", [("f", {"x": [1, {"a": None}]}, "ok")]),
        ("pythonic", "<|python_start|>[add(x=1)]<|python_end|>", [("add", {"x": 1}, "ok")]),
        ("pythonic", "[add(2)]", [("add", {}, "invalid_arguments")]),
        ("pythonic", "[add(x=open('a'))]", [("add", {}, "invalid_arguments")]),
        ("pythonic", "[add(x=2), 4]", [("add", {"x": 2}, "ok"), ("", {}, "invalid_json")]),
        ("pythonic", "[add(x=2", [("add", {}, "unclosed")]),
        ("pythonic", "[add(x=)]", [("add", {}, "invalid_json")]),
        ("pythonic", "[add(x=...)]", [("add", {}, "invalid_arguments")]),
        ("pythonic", "[f(x={1}), g(x={(1, 2): 3})]", [("f", {}, "invalid_arguments"), ("g", {}, "invalid_arguments")]),
        ("pythonic", "[" + "a." * 500 + "a(x=1)]", [("", {}, "invalid_json")]),
        ("pythonic", "[add(x=1)], [now()]", [("add", {}, "invalid_json")]),
        ("pythonic", "[add(x=1)] + [now()]", [("add", {}, "invalid_json")]),
        ("pythonic", "[add(x=i) for i in range(3)]", [("add", {}, "invalid_json")]),
        ("pythonic", "[add(x=1)][0]", [("add", {}, "invalid_json")]),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "add(x=2)", []),
    ],
)  # fmt: skip
def test_calls_are_read_or_said_to_be_broken(form: str, text: str, calls: list[object]) -> None:
    assert found(form, text) == calls


def test_text_around_calls_stays_and_raw_text_is_kept() -> None:
    parsed = PARSERS["hermes"](f"First.\n{CALL}\nThen.")
    assert parsed.content == "First.\n\nThen." and parsed.attempts[0].raw == CALL
    assert PARSERS["pythonic"]("[f(x=1), g()]").attempts[1].raw == "g()"


def test_an_unknown_format_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"tool_format='qwen': expected hermes, json, pythonic; for a parser of vLLM"):
        call_parser("qwen")
