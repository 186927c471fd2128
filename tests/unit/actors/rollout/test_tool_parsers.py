from __future__ import annotations

import pytest

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
