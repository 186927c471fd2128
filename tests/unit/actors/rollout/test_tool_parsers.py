from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.tool_parsers import ToolParserManager

from actors.rollout import tool_parsers
from actors.rollout.tool_parsers import vllm_parser
from rl_backend.contracts import ConfigError
from tests.support.chat_templates import CHATML, marker_tokenizer

GOOD = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'


@pytest.mark.shows("environments: calls are read by vLLM's parsers by name, and what those hide is kept as an attempt")
def test_vllms_parsers_read_calls_and_hide_no_broken_one() -> None:
    tokenizer = marker_tokenizer(CHATML)
    parse = vllm_parser("hermes", tokenizer)
    for _ in range(2):
        parsed = parse(f"I add.{GOOD}")
        assert [(each.name, each.arguments, each.status) for each in parsed.attempts] == [("add", {"x": 2}, "ok")]
        assert parsed.content == "I add."
    broken = parse(f"{GOOD}<tool_call>{{oh</tool_call>")
    assert [each.status for each in broken.attempts] == ["invalid_json"] and broken.attempts[0].raw.startswith(GOOD)
    assert parse("It is 4.").attempts == () and parse("It is 4.").content == "It is 4."
    with pytest.raises(ConfigError, match=r"tool_format='nobody': vLLM has no such parser; it has .*hermes"):
        vllm_parser("nobody", tokenizer)
    with pytest.raises(ConfigError, match=r"tool_format='deepseek_v3': does not take this model's tokenizer"):
        vllm_parser("deepseek_v3", tokenizer)


@pytest.mark.parametrize(
    ("arguments", "status", "found", "problem"),
    [
        ('{"x": [1, 2]}', "ok", {"x": [1, 2]}, ""),
        ("{}", "ok", {}, ""),
        ("[1]", "invalid_json", {}, "its arguments are not an object"),
        ("null", "invalid_json", {}, "its arguments are not an object"),
        ("{oh", "invalid_json", {}, "its arguments are not JSON: Expecting property name"),
    ],
)
def test_arguments_of_a_call_are_an_object(arguments: str, status: str, found: dict[str, object], problem: str) -> None:
    attempt = tool_parsers._attempt("add", arguments)
    assert (attempt.name, attempt.status, attempt.arguments, attempt.raw) == ("add", status, found, f"add({arguments})")
    assert attempt.problem.startswith(problem) and bool(attempt.problem) == bool(problem)


def test_what_a_parser_hides_is_kept_by_the_text_that_begins_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, object]] = []

    class Hiding:
        tool_call_start_token = ""
        tool_calls_start_token = 7
        bot_token = "[CALLS]"

        def __init__(self, tokenizer: object, tools: object) -> None:
            made.append((tokenizer, tools))

        def extract_tool_calls(self, text: str, request: object) -> SimpleNamespace:
            return SimpleNamespace(tools_called=False, content=text.upper(), tool_calls=[])

    monkeypatch.setattr(ToolParserManager, "get_tool_parser", lambda name: Hiding)
    parse = vllm_parser("hiding", "tokenizer", [{"type": "function", "function": {"name": "add", "parameters": {}}}])
    assert parse("plain").content == "plain" and not parse("plain").attempts
    (attempt,) = parse("I do [CALLS]{").attempts
    assert (attempt.name, attempt.status, attempt.raw) == ("", "invalid_json", "I do [CALLS]{")
    assert attempt.problem == "no call could be read, in the format hiding" and not parse("[CALLS]").content
    assert len(made) == 5 and {tokenizer for tokenizer, _ in made} == {"tokenizer"}, "one for each turn"
    ((tool,),) = {tuple(each.function.name for each in tools) for _, tools in made}  # type: ignore[attr-defined]
    assert tool == "add"
