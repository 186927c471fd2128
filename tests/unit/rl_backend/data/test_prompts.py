"""Prompts of all kinds of data: columns, messages, templates, lengths, folders and names on the Hub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import BatchError, ConfigError
from rl_backend.data.chat_template import ChatTemplate, encode_messages, require_utf8
from rl_backend.data.datasets import data_files, open_rows
from rl_backend.data.examples import DataConfig, PromptExample, as_messages, read_examples
from rl_backend.data.hub import HubName, hub_name, local_model
from rl_backend.data.prompts import endless_batches, load_prompts, load_tokenizer
from rl_backend.data.sft import load_sft_examples
from tests.support.chat_templates import CHATML, MARKED, MISTRAL, TEMPLATES, THINKING, chat_tokenizer
from tests.support.claims import ROOT
from tests.support.rows import write_rows

ASKED = [{"role": "user", "content": "2+2?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "4"}]


@pytest.mark.shows("data: messages, prompt and answer columns of any name are read; a last assistant message is the answer")
@pytest.mark.parametrize(
    ("row", "data", "expected"),
    [
        ({"messages": ANSWERED}, {}, PromptExample(ASKED, "4", "a", {}, ANSWERED[1])),
        ({"messages": ANSWERED, "answer": "four"}, {}, PromptExample(ASKED, "four", "a", {}, ANSWERED[1])),
        ({"messages": ASKED, "answer": "four"}, {}, PromptExample(ASKED, "four", "a")),
        ({"q": "2+2?", "a": {"final": 4}}, {"prompt_column": "q", "answer_column": "a.final"}, None),
        (
            {"prompt": "p", "answer": "no", "chat": ASKED, "gold": "4"},
            {"prompt_column": "chat", "answer_column": "gold"},
            PromptExample(ASKED, "4", "a", {"prompt": "p", "answer": "no"}),
        ),
        (
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
                "answer": "4",
            },
            {},
            PromptExample(ASKED, "4", "a"),
        ),
    ],
)
def test_columns_are_found_or_named(tmp_path: Path, row: Any, data: dict[str, Any], expected: PromptExample | None) -> None:
    (example,) = read_examples(write_rows(tmp_path / "a.jsonl", row), DataConfig(**data))
    assert example == (expected or PromptExample("2+2?", 4, "a", {"a": {"final": 4}}))


def test_a_column_that_is_missing_says_which_option_names_it(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x", "answer": "1"}, {"question": "x", "answer": "1"})
    with pytest.raises(BatchError, match=r"line 2, field prompt: missing .* has \['answer', 'question'\]; .* prompt_column"):
        read_examples(path)
    with pytest.raises(BatchError, match=r"line 1, field gold: missing .*; name its column with answer_column"):
        read_examples(path, DataConfig(answer_column="gold"))
    with pytest.raises(BatchError, match=r"field messages: has nothing before the assistant's message"):
        read_examples(write_rows(tmp_path / "b.jsonl", {"messages": ANSWERED[1:]}))


def test_an_answer_is_needed_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "reward_model": {"style": "rule"}})
    assert [example.ground_truth for example in read_examples(path, require_answer=False)] == [None, None]
    assert len(load_prompts(path, chat_tokenizer(None), 8, require_answer=False)) == 2
    with pytest.raises(BatchError, match="ground_truth or answer: missing"):
        load_prompts(path, chat_tokenizer(None), 8)


def test_a_system_prompt_and_template_variables_reach_the_model(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "a.jsonl",
        {"prompt": "2+2?", "answer": "4"},
        {"prompt": [{"role": "system", "content": "Mine."}, *ASKED], "answer": "4"},
    )
    data = DataConfig(system_prompt="Be brief.", text_prompts="message", chat_template_kwargs={"enable_thinking": False})
    tokenizer = chat_tokenizer(THINKING)
    first, second = (tokenizer.decode(prompt.token_ids) for prompt in load_prompts(path, tokenizer, 64, data))
    end = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert first == f"<|im_start|>system\nBe brief.<|im_end|>\n{end}"
    assert second == f"<|im_start|>system\nMine.<|im_end|>\n{end}"


def test_options_of_templates_are_refused_where_they_would_be_ignored(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": ASKED, "answer": "4"}, {"prompt": "2+2?", "answer": "4"})
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]')
    template = "{{ tools }}" + THINKING
    for option in (
        {"system_prompt": "Be brief."},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools_file": str(tools)},
    ):
        with pytest.raises(
            ConfigError, match=r"line 2 is text, which is continued as it stands; set text_prompts to message"
        ):
            load_prompts(path, chat_tokenizer(template), 200, DataConfig(**option))
    with pytest.raises(
        ConfigError,
        match=r"chat_template_kwargs\.thinking=False: the chat template of models/mine does not read it; it reads enable_",
    ):
        encode_messages(ASKED, chat_tokenizer(THINKING), chat_template_kwargs={"thinking": False})
    with pytest.raises(ConfigError, match="it reads no others"):
        encode_messages(ASKED, chat_tokenizer(CHATML), chat_template_kwargs={"enable_thinking": False})


CLOCK = "<|im_start|>system\nToday: {{ strftime_now('%d %b %Y, %H:%M') }}<|im_end|>\n" + CHATML
LLAMA_CLOCK = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}{{ date_string }}\n"
) + CHATML


@pytest.mark.shows("data: a template that writes today's date is given one day, and refused without one")
def test_a_template_that_reads_the_clock_is_given_one_day(tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": ANSWERED}]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    for template in (CLOCK, LLAMA_CLOCK, CLOCK.replace(CHATML, MARKED)):
        tokenizer = chat_tokenizer(template)
        for read in (
            lambda data, tokenizer=tokenizer: load_prompts(path, tokenizer, 200, data)[0].token_ids,
            lambda data, tokenizer=tokenizer: load_sft_examples(path, tokenizer, 200, 300, data)[0][0].input_ids.tolist(),
            lambda data, tokenizer=tokenizer: [ChatTemplate(tokenizer, data.chat_template_kwargs).turn_end(ASKED)],
        ):
            with pytest.raises(
                ConfigError,
                match=r"^chat_template_kwargs\.strftime_now=None: .* models/mine writes today's date.*strftime_now\": \"20",
            ):
                read(DataConfig())
        for day in ("2026-01-31", date(2026, 1, 31), "2026-01-31T00:00"):
            data = DataConfig(chat_template_kwargs={"strftime_now": day})
            text = tokenizer.decode(load_prompts(path, tokenizer, 200, data)[0].token_ids)
            assert "31 Jan 2026" in text.split("2+2")[0]
            assert "31 Jan 2026" in tokenizer.decode(load_sft_examples(path, tokenizer, 200, 300, data)[0][0].input_ids)
    given = {"date_string": "1 May 2025"}
    assert tokenizer_text(LLAMA_CLOCK, given).startswith("1 May 2025\n")
    with pytest.raises(ConfigError, match=r"strftime_now='today': is no day, .*; give one such as 2026-01-31"):
        tokenizer_text(CLOCK, {"strftime_now": "today"})
    with pytest.raises(ConfigError, match="does not read it"):
        tokenizer_text(CHATML, {"strftime_now": "2026-01-31"})


def tokenizer_text(template: str, variables: dict[str, Any]) -> str:
    tokenizer = chat_tokenizer(template)
    return str(tokenizer.decode(encode_messages(ASKED, tokenizer, chat_template_kwargs=variables)))


@pytest.mark.shows("data: a JSON text of messages is read as these messages, and text that only looks like one is refused")
@pytest.mark.parametrize("column", ["messages", "prompt", "chat"])
def test_a_json_text_of_messages_is_read_as_the_messages(tmp_path: Path, column: str) -> None:
    data = DataConfig(prompt_column="chat" if column == "chat" else None)
    written = [json.dumps(ANSWERED), json.dumps(ASKED, indent=1), ASKED]
    path = write_rows(tmp_path / "a.jsonl", *({column: each, "answer": "4"} for each in written))
    first, *others = read_examples(path, data)
    assert first == PromptExample(ASKED, "4", "a", {}, ANSWERED[1])
    assert others == [PromptExample(ASKED, "4", "a")] * 2
    for text in (str(ASKED), json.dumps(ASKED)[:-1], '[{"content": "x", '):
        with pytest.raises(BatchError, match=rf"field {column}: is .*; expected a list of chat messages, or its JSON text"):
            read_examples(write_rows(tmp_path / "b.jsonl", {column: text, "answer": "4"}), data)
    half = write_rows(tmp_path / "b.jsonl", {column: '[{"role": "user", "content": "\\ud83d"}]', "answer": "4"})
    with pytest.raises(BatchError, match=rf"field {column}\[0\]\.content: .* half of a surrogate pair"):
        read_examples(half, data)


def test_other_texts_stay_texts_and_a_column_of_messages_has_none(tmp_path: Path) -> None:
    texts = ["[1, 2] has", "[1, 2]", '[{"a": 1}]', "[]", "2+2?"]
    for text in texts:
        (example,) = read_examples(write_rows(tmp_path / "a.jsonl", {"prompt": text, "answer": "4"}))
        assert example.prompt == text
        path = write_rows(tmp_path / "b.jsonl", {"messages": text, "answer": "4"})
        with pytest.raises(BatchError, match=r"field messages: is .*; name a column of texts with prompt_column"):
            read_examples(path)
        assert read_examples(path, DataConfig(prompt_column="messages"))[0].prompt == text


def test_calls_as_a_json_text_are_calls(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    for given in (calls, json.dumps(calls)):
        messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": given}, {"role": "tool", "content": "4"}]
        (example,) = read_examples(write_rows(tmp_path / "a.jsonl", {"messages": messages, "answer": "4"}))
        assert example.prompt[1] == {"role": "assistant", "content": "", "tool_calls": calls}
    messages[1]["tool_calls"] = "add(1)"
    with pytest.raises(BatchError, match=r"field messages\[1\]\.tool_calls: is 'add\(1\)'; expected a list of calls, each"):
        read_examples(write_rows(tmp_path / "a.jsonl", {"messages": messages, "answer": "4"}))


def test_messages_without_a_chat_template_name_folder_file_and_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"^model='models/mine': its tokenizer has no chat template.*; add that file"
    ) as caught:
        encode_messages(ASKED, chat_tokenizer(None))
    assert "chat_template.jinja" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"not Jinja, line 1"):
        encode_messages(ASKED, chat_tokenizer("{% if %}"))


def test_the_page_of_data_turns_messages_into_tokens_as_it_stands(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL))
    names: dict[str, Any] = {"model_dir": str(tmp_path)}
    exec(compile(code, "data.md", "exec"), names)
    assert tokenizer.decode(names["prompt_ids"]) == "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert names["eos"] == tokenizer.eos_token_id


def test_the_end_of_a_turn_is_known_from_the_template() -> None:
    ends = {}
    for name, template in {**TEMPLATES, "none": CHATML.replace("<|im_end|>", "")}.items():
        tokenizer = chat_tokenizer(template)
        end = ChatTemplate(tokenizer).turn_end(ASKED)
        ends[name] = None if end is None else tokenizer.decode([end])
    of_chatml = dict.fromkeys(("chatml", "marked", "thinking"), "<|im_end|>")
    assert ends == {**of_chatml, "llama": "<|eot_id|>", "mistral": "</s>", "phi": "<|end|>", "none": None}


def test_messages_that_the_template_refuses_name_the_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", {"prompt": [{"role": "tool", "content": "x"}], "answer": "4"})
    with pytest.raises(
        BatchError, match=r"a\.jsonl, line 1: .* refuses messages of the roles tool: .*only user and assistant"
    ):
        load_prompts(path, chat_tokenizer(MISTRAL), 64)


@pytest.mark.shows("data: prompts that are too long are refused, filtered out or cut, with their number")
def test_prompts_that_are_too_long_are_refused_filtered_or_cut_with_their_count(tmp_path: Path) -> None:
    rows = [{"prompt": "z" * length, "answer": "4"} for length in (3, 9, 5, 12)]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    tokenizer = chat_tokenizer(None)
    with pytest.raises(
        BatchError,
        match=r"a\.jsonl: 2 of 4 prompts have more tokens than max_prompt_tokens=6 \(the first is .*line 2 with 9, "
        r"the longest has 12\); raise it, or set too_long to filter or cut",
    ):
        load_prompts(path, tokenizer, 6)
    filtered = load_prompts(path, tokenizer, 6, DataConfig(too_long="filter"))
    assert [len(prompt.token_ids) for prompt in filtered] == [3, 5]
    assert filtered.note == "2 of 4 prompts have more tokens than max_prompt_tokens=6: filtered"
    assert load_prompts(path, tokenizer, 12).note == ""
    with pytest.raises(BatchError, match=r"4 of 4 prompts have more tokens than max_prompt_tokens=1 .*; raise it$"):
        load_prompts(path, tokenizer, 1, DataConfig(too_long="filter"))


def test_a_cut_keeps_the_end_of_a_prompt_and_the_token_that_begins_texts(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(MISTRAL)
    path = write_rows(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "abcdefgh"}], "answer": "4"})
    whole = load_prompts(path, tokenizer, 64)[0].token_ids
    cut = load_prompts(path, tokenizer, 6, DataConfig(too_long="cut"))
    assert cut[0].token_ids == [tokenizer.bos_token_id, *whole[-5:]]
    assert cut.note == "1 of 1 prompts has more tokens than max_prompt_tokens=6: cut"


def test_prompts_are_made_when_they_are_asked_for_and_a_change_of_the_file_is_seen(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", *({"prompt": f"{number}", "answer": "4"} for number in range(1000)))
    prompts = load_prompts(path, chat_tokenizer(None), 8)
    assert prompts[-1].example.prompt == "999" and [each.example.prompt for each in prompts[:2]] == ["0", "1"]
    assert prompts[5] is not prompts[5]
    batch = next(endless_batches(prompts, 4, seed=1))
    path.write_text(path.read_text().replace('"7"', '"8"', 1))
    assert prompts[6].example.prompt == "6"
    with pytest.raises(BatchError, match=r"line 8: was changed while it was in use"):
        prompts[7]
    assert batch == next(endless_batches([*load_prompts(path, chat_tokenizer(None), 8)], 4, seed=1))


def test_a_name_is_a_path_unless_it_can_only_be_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    paths = ("mine", "/a/b", "./a/b", "~/a", "../a", "a/b/c", "data/train.jsonl", "data/x.parquet", "models/mine", "a/b@")
    assert [hub_name(path) for path in paths] == [None] * len(paths)
    assert hub_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B", None)
    assert hub_name("Qwen/Qwen3-0.6B@refs/pr/1") == HubName("Qwen/Qwen3-0.6B", "refs/pr/1")


@pytest.mark.shows("data: a missing model or data set is named without a word about a network")
def test_what_is_missing_here_never_speaks_of_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for model in ("mine", "models/mine", "/no/such", "~/none"):
        with pytest.raises(ConfigError, match=r"^model='.*': no such folder .*; give a folder with config.json") as caught:
            load_tokenizer(model)
        with pytest.raises(
            ConfigError, match=r"^dataset='.*no such file or folder .*; give a \.jsonl, \.json, \.csv or"
        ) as missing:
            open_rows(model)
        for error in (caught, missing):
            assert not any(word in str(error.value) for word in ("connect", "network", "reach", "offline"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        local_model(tmp_path / "file")


def cached_model(cache: Path) -> Path:
    """A model of the Hub as its library keeps it."""
    root = cache / "models--org--mine"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0" * 40)
    snapshot = root / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


@pytest.mark.shows("data: models and data sets are named on the Hub; without a network one sentence says what to do")
def test_a_model_of_the_hub_is_its_folder_and_without_a_network_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot = cached_model(tmp_path)
    assert local_model("org/mine") == str(snapshot)
    with pytest.raises(ConfigError) as caught:
        local_model("org/other", field="GRPOConfig.model")
    assert str(caught.value) == (
        "GRPOConfig.model='org/other': is not a folder here, and of the Hub nothing is in this machine's cache while "
        "HF_HUB_OFFLINE is set; give a path, or download the model where there is a network"
    )


def test_without_a_network_a_model_of_the_hub_is_one_sentence_too() -> None:
    code = "from rl_backend.data.hub import local_model; local_model('org/other')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ConfigError: model='org/other': is not a folder here, and of the Hub nothing" in done.stderr.splitlines()[-1]
    assert "while it cannot be reached; give a path" in done.stderr


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    return library


def test_folders_of_datasets_are_read_with_their_splits(tmp_path: Path, datasets: Any) -> None:
    train, test = (datasets.Dataset.from_list([{"prompt": ASKED, "answer": name}]) for name in ("train", "test"))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "both")
    (tmp_path / "files").mkdir()
    for name in ("train", "test"):
        write_rows(tmp_path / "files" / f"{name}.jsonl", {"prompt": ASKED, "answer": name})

    def answers(source: str, **options: Any) -> list[Any]:
        return [row["answer"] for row in open_rows(f"{tmp_path}/{source}", **options)]

    assert answers("one") == answers("both") == answers("files") == answers("both::train") == ["train"]
    assert answers("both::test") == answers("files::test", default_split=None) == ["test"]
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "any.csv").write_text("prompt,answer\n2+2=,four\n")
    assert answers("table") == ["four"]
    assert read_examples(tmp_path / "one") == [PromptExample(ASKED, "train", "one")]
    assert {file.suffix for source in ("one", "both") for file in data_files(tmp_path / source)} == {".arrow"}
    with pytest.raises(ConfigError, match=r"eval_dataset='.*both': has several splits, train, test; name one .*both::train"):
        open_rows(tmp_path / "both", field="eval_dataset", default_split=None)
    with pytest.raises(ConfigError, match=r"files::dev': has no split 'dev', but (train, test|test, train); name one"):
        open_rows(f"{tmp_path}/files::dev")
    with pytest.raises(ConfigError, match=r"one::train': is one data set without splits; leave out 'train'"):
        open_rows(f"{tmp_path}/one::train")
    with pytest.raises(ConfigError, match=r"datasets saved this folder, without subsets; leave out 'main'"):
        open_rows(f"{tmp_path}/both:main:test")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty': cannot be read by datasets: \w+: .*doesn't contain any data files"):
        open_rows(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE is set; give a path, or download the data set where"):
        open_rows("org/other:main:test")


def test_without_a_library_its_name_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.parquet").touch()
    for library, source in (("datasets", tmp_path), ("pyarrow", tmp_path / "rows.parquet")):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ModuleNotFoundError, match=library):
            open_rows(source)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("\ud800", ""),
        ({"messages": ({"content": "\ud800"},)}, ".messages[0].content"),
        ([("a", "b"), ("c", "\ud800")], "[1][1]"),
        ({"tools": [{"a": ["b", {"c": "\ud800"}]}]}, ".tools[0].a[1].c"),
    ],
    ids=lambda value: value or "itself" if isinstance(value, str) and value != "\ud800" else "",
)
def test_half_of_a_surrogate_pair_is_found_in_lists_tuples_and_objects(value: Any, place: str) -> None:
    with pytest.raises(BatchError, match=rf"^row 3{re.escape(place)}: character 1 is '.ud800', half of a surrogate pair"):
        require_utf8(value, "row 3")
    require_utf8(json.loads(json.dumps(value).replace("ud800", "u00e4")), "row 3")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_system_message_anywhere_in_a_row_takes_the_place_of_the_runs_own(place: int) -> None:
    data = DataConfig(system_prompt="Be brief.")
    turns = [*ASKED, *ASKED]
    assert as_messages(turns, data, "row 1") == [{"role": "system", "content": "Be brief."}, *turns]
    given = [*turns[:place], {"role": "system", "content": "Mine."}, *turns[place:]]
    assert as_messages(given, data, "row 1") == given
