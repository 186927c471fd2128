from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from actors.run.transcripts import describe_episodes, transcript
from rl_backend.environment import ToolCall, Turn
from rl_backend.lab.text import json_text
from tests.support.episodes import episode, segment

SPECIAL = {7: "<|im_end|>", 8: "<think>"}


class Words:
    """A tokenizer of a word for each token, some of which are special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        words = (SPECIAL.get(token, f"w{token} ") for token in token_ids)
        return "".join(word for word in words if not (skip_special_tokens and word in SPECIAL.values()))


def test_a_transcript_shows_special_tokens_wherever_they_were_sampled_or_given() -> None:
    parts = [("given", [7, 1]), ("sampled", [8, 2, 7]), ("given", [3, 7]), ("sampled", [4, 7])]
    played = replace(
        episode(segment(parts)),
        turns=[Turn(None, [8, 2, 7], [0.0] * 3, "stop"), Turn(None, [4, 7], [0.0] * 2, "length")],
    )
    (line,) = describe_episodes([played], Words())
    assert [turn["text"] for turn in line["turns"]] == ["<think>w2 <|im_end|>", "w4 <|im_end|>"]
    assert line["segments"] == [
        [["<|im_end|>w1 ", False], ["<think>w2 <|im_end|>", True], ["w3 <|im_end|>", False], ["w4 <|im_end|>", True]]
    ]
    assert (line["prompt"], line["response"]) == ("<|im_end|>w1 ", "<think>w2 <|im_end|>w3 <|im_end|>w4 <|im_end|>")
    shown = transcript(played, Words())
    assert "model, turn 1 (stop, reward 0): <think>w2 <|im_end|>\n" in shown
    assert shown.endswith("<|im_end|>w1 [<think>w2 <|im_end|>]w3 <|im_end|>[w4 <|im_end|>]")


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
