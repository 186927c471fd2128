"""What ends a response: the tokenizer's, the generation config's and the chat template's tokens."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.collect.stop_tokens import Ends, disagreement_of_ends, stop_token_ids
from actors.rollout.config import SamplingConfig
from actors.watch.metrics import Clock
from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import ChatTemplate
from rl_backend.data.examples import DataConfig, PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.trace.recorder import recorder
from tests.support.chat_templates import CHATML, chat_tokenizer

TOKENIZER: Any = SimpleNamespace(eos_token_id=2)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": 5}, (2, 5)),
        ({"eos_token_id": 0}, (2, 0)),
        ({"eos_token_id": [7, 2, 0, 7]}, (2, 7, 0)),
    ],
)
def test_a_response_ends_with_the_tokenizers_and_the_generation_configs_tokens(
    tmp_path: Path, named: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert stop_token_ids(str(tmp_path), TOKENIZER) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps(named))
    assert stop_token_ids(str(tmp_path), TOKENIZER) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": "x"}', r"eos_token_id=\['x'\], expected token ids"),
        ('{"eos_token_id": [1, true]}', r"eos_token_id=\[1, True\], expected"),
        ("[]", "is a list, not a JSON object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_damaged_generation_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^model='\S+': generation_config\.json cannot be used: {message}"):
        stop_token_ids(str(tmp_path), TOKENIZER)


def prompt(content: Any, **more: Any) -> Prompt:
    return Prompt(PromptExample(content, "1", "d", **more), [1])


def messages(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]


def test_the_template_is_asked_once_for_each_form_of_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ChatTemplate]] = []

    def turn_end(template: ChatTemplate, found: Any) -> int | None:
        asked.append((len(found), template))
        return {1: 9, 2: None, 3: 0}[len(found)]

    monkeypatch.setattr(ChatTemplate, "turn_end", turn_end)
    ends = Ends(str(tmp_path), TOKENIZER, DataConfig(chat_template_kwargs={"x": 1}))
    tools = [{"name": "add"}]
    Ends(str(tmp_path), TOKENIZER, DataConfig()).see(prompt("plain text"), "row 1")
    for _ in range(2):
        ends.see(prompt(messages("user")), "row 2")
        ends.see(prompt(messages("system", "user")), "row 3")
    ends.see(prompt(messages("user", "assistant", "user")), "row 4")
    ends.see(prompt(messages("user"), tools=tools), "row 5")
    ends.see(prompt(messages("user"), documents=({"text": "t"},)), "row 6")
    ends.see(prompt(messages("user"), tools=[{"name": "sub"}]), "row 7")
    assert [number for number, _ in asked] == [1, 2, 3, 1, 1]
    assert asked[3][1] == ChatTemplate(TOKENIZER, {"x": 1}, tools, ())
    assert asked[4][1].documents == ({"text": "t"},)
    given = SamplingConfig(stop_token_ids=(8, 9), top_p=0.5)
    assert ends.added_to(given) == given.replace(stop_token_ids=(8, 9, 2, 0))
    assert Ends(str(tmp_path), TOKENIZER, DataConfig()).added_to(given).stop_token_ids == (8, 9, 2), "it has seen nothing"


def test_a_template_that_refuses_an_answer_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BatchError("the template wants a system message")

    monkeypatch.setattr(ChatTemplate, "turn_end", refuse)
    with pytest.raises(BatchError, match=r"^d\.jsonl, row 3: the template wants a system message$"):
        Ends(str(tmp_path), TOKENIZER, DataConfig()).see(prompt(messages("user")), "d.jsonl, row 3")


def test_a_clock_adds_up_times_and_tokens_of_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5_000_000_000]
    monkeypatch.setattr("actors.watch.metrics.time", SimpleNamespace(monotonic_ns=lambda: now[0]))
    clock = Clock()
    for phase, seconds, tokens in (("sample", 2, 0), ("train", 4, 10), ("sample", 1, 9), ("train", 1, 20), ("quick", 0, 7)):
        now[0] += seconds * 1_000_000_000
        clock.lap(phase, tokens)
    assert clock.seconds == {"seconds/sample": 3.0, "seconds/train": 5.0, "seconds/quick": 0.0}
    assert clock.rates == {"tokens_per_second/train": 6.0, "tokens_per_second/sample": 3.0}
    assert not recorder.recording


@pytest.mark.shows("check: a tokenizer that ends a text differently from generation config and chat template is named")
@pytest.mark.parametrize(
    ("end", "named", "template", "expected"),
    [
        ("<|im_end|>", ["<|im_end|>"], CHATML, ""),
        ("</s>", ["<|im_end|>", "</s>"], CHATML, ""),
        ("</s>", ["</s>"], None, ""),
        ("</s>", [], None, ""),
        ("<|im_start|>", ["<|im_end|>"], CHATML, "but generation_config.json ends one with {0}, and {1}; make eos_token"),
        ("<|im_start|>", ["<|im_end|>"], None, "but generation_config.json ends one with {0}; make eos_token"),
        ("</s>", [], CHATML, "but {1}; make eos_token of tokenizer_config.json and generation_config.json agree with it"),
        ("</s>", ["</s>"], CHATML, "but {1}; make eos_token"),
    ],
)
def test_ends_that_disagree_are_named(
    tmp_path: Path, end: str, named: list[str], template: str | None, expected: str
) -> None:
    tokenizer = chat_tokenizer(template)
    tokenizer.eos_token = end
    if named:
        ids = tokenizer.convert_tokens_to_ids(named)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    shown = f"<|im_end|> ({tokenizer.convert_tokens_to_ids('<|im_end|>')})"
    found = disagreement_of_ends(str(tmp_path), tokenizer, DataConfig())
    wanted = expected.format(shown, f"the chat template ends an answer with {shown}")
    assert found.startswith(wanted) and bool(found) == bool(expected)
