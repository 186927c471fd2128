"""Episodes as lines of the logs, and as text for people."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from actors.collect.transcripts import describe_episodes, transcript
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


def test_a_line_has_all_segments_turns_calls_and_spans_of_an_episode() -> None:
    calls = [
        ToolCall("add", {"a": 1}, "ok", "raw text", "2"),
        ToolCall("", {}, "invalid_call", "add(", "no such call"),  # type: ignore[arg-type]
    ]
    first = Turn(
        None,
        [2, 3],
        [0.0] * 2,
        "stop",
        calls=calls,
        versions=[5, 5],
        given=[{"role": "system", "content": None}, {"role": "user", "content": "hi"}, {"content": [1]}],
        reward=0.5,
    )
    second = Turn(None, [4], [0.0], "length", versions=[6], reward=-1.0)
    third = Turn(None, [5, 6], [0.0] * 2, "stop", versions=[6, 5])
    segments = segment([("given", [1]), ("sampled", [2, 3])]), segment([("given", [9, 9]), ("sampled", [4]), ("given", [1]),
                                                                     ("sampled", [5, 6])])  # fmt: skip
    played = replace(
        episode(*segments, reward=1.25, stop="timeout"), turns=[first, second, third], error="too slow", metrics={"won": 1.0}
    )
    line, again = describe_episodes([played, played], Words())
    assert line == again and "dropped" not in line
    assert (line["prompt"], line["response"]) == ("w1 ", "w9 w9 w4 w1 w5 w6 "), "what follows is in another segment"
    assert line["segments"] == [
        [["w1 ", False], ["w2 w3 ", True]],
        [["w9 w9 ", False], ["w4 ", True], ["w1 ", False], ["w5 w6 ", True]],
    ]
    assert line["version_spans"] == [[5, 2], [6, 2], [5, 1]]
    assert (line["reward"], line["stop"], line["error"], line["metrics"]) == (1.25, "timeout", "too slow", {"won": 1.0})
    told, *others = line["turns"]
    assert told["given"] == [
        {"role": "system", "content": ""},
        {"role": "user", "content": "hi"},
        {"role": "", "content": "[1]"},
    ]
    assert told["calls"] == [
        {"name": "add", "arguments": {"a": 1}, "status": "ok", "answer": "2"},
        {"name": "", "arguments": {}, "status": "invalid_call", "answer": "no such call", "raw": "add("},
    ]
    assert [(each["reward"], each["finish"]) for each in line["turns"]] == [(0.5, "stop"), (-1.0, "length"), (0.0, "stop")]
    assert [each["text"] for each in others] == ["w4 ", "w5 w6 "]
    assert transcript(played, Words()) == (
        "system: \nuser: hi\n: [1]\nmodel, turn 1 (stop, reward 0.5): w2 w3 \n  add({'a': 1}) -> ok: 2\n"
        "  ?({}) -> invalid_call: no such call\nmodel, turn 2 (length, reward -1): w4 \n"
        "model, turn 3 (stop, reward 0): w5 w6 \nended: timeout: too slow; reward 1.25 in 3 turns\n"
        "trained tokens in brackets: w1 [w2 w3 ]w9 w9 [w4 ]w1 [w5 w6 ]"
    )


def test_an_episode_that_ended_before_its_first_turn_has_a_line_too() -> None:
    (line,) = describe_episodes([replace(episode(stop="error"), error="no door")], Words(), dropped=True)
    assert (line["prompt"], line["response"], line["turns"], line["segments"]) == ("", "", [], [])
    assert (line["dropped"], line["error"], line["version_spans"]) == (True, "no door", [])
    assert transcript(episode(), Words()) == "ended: done; reward 0 in 0 turns\ntrained tokens in brackets: "
