from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError
from rl_backend.environment.tool_call_parsers import PARSERS, call_parser, no_calls

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


@pytest.mark.parametrize(
    ("form", "text", "content", "expected"),
    [
        (
            "hermes",
            '<think>a</think>b<tool_call>{"name": "f"</tool_call> c',
            "<think>a</think>b c",
            [("f", '<tool_call>{"name": "f"</tool_call>', "it is not JSON: ")],
        ),
        (
            "hermes",
            'b <tool_call>[1]</tool_call><tool_call>{"name": "g", "x"',
            "b",
            [
                ("", "<tool_call>[1]</tool_call>", 'expected {"name": ..., "arguments": {...}}'),
                ("g", '<tool_call>{"name": "g", "x"', "the call has no </tool_call>"),
            ],
        ),
        (
            "hermes",
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            "",
            [("", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'expected {"name"')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{x"}</tool_call>',
            "",
            [("f", '<tool_call>{"name": "f", "arguments": "{x"}</tool_call>', "its arguments are not JSON: ")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": null}</tool_call>',
            "",
            [("f", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "its arguments are not an object")],
        ),
        (
            "json",
            '<think>a</think>\n [{"name": "f"}, {"name": "g", "arguments": [1]}]',
            "<think>a</think>",
            [("f", '{"name": "f"}', ""), ("g", '{"name": "g", "arguments": [1]}', "its arguments are not an object")],
        ),
        ("json", '<think>a</think>{"name": "f"', "<think>a</think>", [("f", '{"name": "f"', "it is not JSON: ")]),
        ("json", '<think>{"name": "f"}', '<think>{"name": "f"}', []),
        ("json", ' [{"name": "f"}, {"x": 1}] ', '[{"name": "f"}, {"x": 1}]', []),
        ("json", " [] ", "[]", []),
        ("json", '{"answer" 4}', '{"answer" 4}', []),
        (
            "pythonic",
            "<think>a</think>[m.f(x=1), g(1)]",
            "<think>a</think>",
            [("m.f", "m.f(x=1)", ""), ("g", "g(1)", "give every argument by its name")],
        ),
        ("pythonic", "[f(**{'x': 1})]", "", [("f", "f(**{'x': 1})", "give every argument by its name")]),
        ("pythonic", "[f(x=b'1')]", "", [("f", "f(x=b'1')", "a value is none that JSON has")]),
        ("pythonic", "[f(x=y)]", "", [("f", "f(x=y)", "a value is no constant")]),
        ("pythonic", "[f(x=1), h()()]", "", [("f", "f(x=1)", ""), ("", "h()()", "expected name(argument=value, ...)")]),
        ("pythonic", "[ f(x=1]", "", [("f", "[ f(x=1]", "it is not a list of calls: ")]),
        ("pythonic", "[f()] and [g()]", "", [("f", "[f()] and [g()]", "it is not one list of calls: write nothing around")]),
        ("pythonic", " It is [4]. ", "It is [4].", []),
    ],
)
def test_what_is_told_of_each_attempt_and_what_is_left_of_the_text(
    form: str, text: str, content: str, expected: list[tuple[str, str, str]]
) -> None:
    parsed = PARSERS[form](text)
    assert parsed.content == content
    assert [(each.name, each.raw) for each in parsed.attempts] == [each[:2] for each in expected]
    for attempt, (_, _, problem) in zip(parsed.attempts, expected, strict=True):
        assert attempt.problem.startswith(problem) and bool(attempt.problem) == bool(problem)
        assert (attempt.status == "ok") == (problem == "")


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_come_before_parameters_and_a_long_name_is_cut(key: str) -> None:
    assert found("json", f'{{"name": "f", "{key}": {{"x": 1}}}}') == [("f", {"x": 1}, "ok")]
    both = '{"name": "f", "parameters": {"x": 1}, "arguments": {"y": 2}}'
    assert found("json", both) == [("f", {"y": 2}, "ok")]
    assert found("hermes", f'<tool_call>{{"name": "{"n" * 99}", </tool_call>') == [("n" * 80, {}, "invalid_json")]
    assert no_calls(" <tool_call>{} ").content == " <tool_call>{} " and not no_calls("<tool_call>").attempts
