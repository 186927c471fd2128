from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from actors.run.transcripts import describe_episodes
from rl_backend.environment import ToolCall, Turn
from rl_backend.lab.text import json_text
from tests.support.episodes import episode

TOKENIZER = SimpleNamespace(decode=lambda token_ids, **_: "")


def test_a_transcript_has_whatever_a_parser_made_of_a_call() -> None:
    nested: list[Any] = []
    nested.append(nested)
    arguments = {"a": ..., "b": {1, 2}, ("c",): [1, None, 0.5], "d": nested}
    call = ToolCall("add", arguments, "invalid_arguments", "add(...)")  # type: ignore[arg-type]
    turn = Turn(None, [1], [0.0], "stop", calls=[call])
    (line,) = describe_episodes([replace(episode(), turns=[turn])], TOKENIZER)
    (found,) = json.loads(json_text(line))["turns"][0]["calls"]
    deep = found["arguments"].pop("d")
    assert found["arguments"] == {"a": "Ellipsis", "b": "{1, 2}", "('c',)": [1, None, 0.5]} and "..." in str(deep)
